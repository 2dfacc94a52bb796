"""Run by Alembic: applies revisions on the connection and in the transaction that `migrate` has opened."""

from alembic import context

from lorimer.store.tables import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    transactional_ddl=True,
    render_as_batch=True,
)
context.run_migrations()
