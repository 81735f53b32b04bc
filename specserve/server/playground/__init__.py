"""The playground: a page that shows answers in coloured runs of accepted drafts."""
