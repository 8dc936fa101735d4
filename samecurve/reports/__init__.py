"""Charts and HTML pages of measured results. Imports: metrics and the layers below it; never engines."""
