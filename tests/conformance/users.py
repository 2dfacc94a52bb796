"""A user of the server with keys, and the clients of an SDK that act for them."""

from dataclasses import dataclass
from typing import Any

import tinker


@dataclass(frozen=True)
class User:
    url: str
    key: str
    sdk: Any = tinker
    """The module with the clients."""

    def service(self, **arguments: object) -> tinker.ServiceClient:
        return self.sdk.ServiceClient(base_url=self.url, api_key=self.key, **arguments)

    def rest(self) -> tinker.RestClient:
        return self.sdk.RestClient(base_url=self.url, api_key=self.key)

    def admin(self) -> tinker.AdminClient:
        return self.sdk.AdminClient(base_url=self.url, api_key=self.key)
