"""The playground: a page that colours an answer's tokens by their accepted drafts."""
