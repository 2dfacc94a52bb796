"""Leases: rows that say which server does what only one at a time may do. Only the database's clock is compared."""

from sqlalchemy import Connection, literal_column

from lorimer.store.tables import insert, leases

_NOW = {
    "sqlite": "(julianday('now') - 2440587.5) * 86400.0",
    "postgresql": "CAST(EXTRACT(EPOCH FROM clock_timestamp()) AS double precision)",
}


def take(c: Connection, name: str, holder: str, seconds: float) -> bool:
    """Take a lease, or extend one's own. Return False if another holder has it."""
    now = literal_column(_NOW[c.dialect.name], leases.c.until.type)
    new = insert(c, leases).values(name=name, holder=holder, until=now + seconds)
    free = (leases.c.until <= now) | (leases.c.holder == holder)
    taken = new.on_conflict_do_update(
        index_elements=[leases.c.name], set_={"holder": holder, "until": now + seconds}, where=free
    )
    return bool(c.execute(taken.execution_options(preserve_rowcount=True)).rowcount == 1)
