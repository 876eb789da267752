"""The stages of the study, a module each. A command of ``workflow/scripts`` maps its flags to one call of a ``run``."""
