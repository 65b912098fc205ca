"""Starts the worker: ``python __main__.py REQUESTS ANSWERS``, two descriptors by number, or two workers at once:
``python __main__.py REQUESTS ANSWERS REQUESTS ANSWERS OUTPUT ERRORS``, the last two for the second's standard ones.

Kept to what any Python can parse, so that one that is too old can be told so.
"""

import importlib.util
import os
import sys

if __name__ == "__main__":
    if sys.hexversion < 0x030A0000:
        sys.exit("Python 3.10 or newer is needed; this is " + sys.version.split()[0])
    sys.dont_write_bytecode = True
    folder = os.path.dirname(os.path.abspath(__file__))
    if sys.path and os.path.realpath(sys.path[0]) == os.path.realpath(folder):
        del sys.path[0]  # its modules must not be found under their bare names
    spec = importlib.util.spec_from_file_location(
        "moepad_worker", os.path.join(folder, "__init__.py"), submodule_search_locations=[folder]
    )
    if spec is None or spec.loader is None:
        sys.exit("the worker's package is not beside " + __file__)
    package = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = package
    spec.loader.exec_module(package)
    serve = importlib.import_module("moepad_worker.serve")
    numbers = [int(argument) for argument in sys.argv[1:]]
    if len(numbers) == 2:
        serve.run(*numbers)
    serve.run_twins(tuple(numbers[:2]), tuple(numbers[2:4]), *numbers[4:])
