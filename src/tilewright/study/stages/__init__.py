"""The stages of the study, a module each: what a command of `workflow/scripts` calls."""
