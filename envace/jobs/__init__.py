"""The verbs as Python calls: they resolve names, open worlds and run folders, and call the layers below.

The command line parses, calls these, and prints. Import a verb from its module, or from `envace` itself.
"""
