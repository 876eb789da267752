"""The study: configuration, stages, experiments, tables, figures and report. Nothing outside imports it."""
