import sqlite3


def find_user(connection: sqlite3.Connection, name: str) -> object:
    return connection.execute(f"SELECT * FROM users WHERE name = '{name}'").fetchone()
