"""The controller: chooses the shape of each step from expected tokens and expected time."""
