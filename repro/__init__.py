"""The library behind ``moepad``: padded batches, engines under test, the oracle and the judge."""
