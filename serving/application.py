"""What Serve says of the application this process belongs to."""

from __future__ import annotations

import asyncio
import logging

from ray import serve
from ray.serve.schema import ApplicationStatus

logger = logging.getLogger("ferry.replica")

STATUS_TIMEOUT_S = 2.0


async def application_is_going() -> bool:
    """Whether the whole application is being deleted, not only the replica this runs in."""
    name = serve.get_replica_context().app_name
    try:
        status = await asyncio.wait_for(asyncio.to_thread(serve.status), STATUS_TIMEOUT_S)
    except Exception as error:
        logger.warning("no answer from Serve's controller: %s", type(error).__name__)
        return False
    application = status.applications.get(name)
    return application is None or application.status == ApplicationStatus.DELETING
