"""Extensions of the documentation site: `mkdocs.yml` names them, and `make docs` runs them."""
