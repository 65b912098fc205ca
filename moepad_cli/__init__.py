"""The command line of ``moepad``: parse, call the library, render. No logic of the field."""
