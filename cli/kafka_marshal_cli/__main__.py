"""Run the command as ``python -m kafka_marshal_cli``."""

from kafka_marshal_cli.main import main

if __name__ == "__main__":
    main()
