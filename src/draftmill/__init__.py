"""draftmill trains DFlash drafters: prompts -> generate -> tokenize -> extract and train -> evaluate -> export."""

__version__ = "0.1.0"
