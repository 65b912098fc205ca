import sys

from moepad_cli.app import main

sys.exit(main())
