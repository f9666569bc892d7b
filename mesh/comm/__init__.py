"""Communication between ranks: worlds, process groups, and a record of communication."""
