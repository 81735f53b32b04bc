"""Draft methods by the name users give. Nothing outside this folder may branch on a method's name."""
