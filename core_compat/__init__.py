"""Names of other packages, resolved to this one, so that programs written for them run after a change of import
lines.
"""
