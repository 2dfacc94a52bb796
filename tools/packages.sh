#!/bin/sh
# Installs Debian packages that some tests need (chromium, faketime, nginx, postgresql), where they are missing and can be installed:
# by root, with apt-get. Without them those tests are skipped with a reason, so this never fails.
is_installed() {
	case "$1" in
	chromium) command -v chromium || command -v chromium-browser ;;
	postgresql) ls /usr/lib/postgresql/*/bin/initdb || command -v initdb ;;
	*) command -v "$1" || PATH="$PATH:/usr/sbin" command -v "$1" ;;
	esac > /dev/null 2>&1
}

missing=""
for package in "$@"; do
	is_installed "$package" || missing="$missing $package"
done
[ -n "$missing" ] && [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null || exit 0
echo "installing$missing for tests"
export DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 # RUNLEVEL: start no service
quickly="-o Acquire::Retries=1 -o Acquire::http::Timeout=20 -o DPkg::Lock::Timeout=60"
# shellcheck disable=SC2086 # the options and names are words
{ apt-get $quickly update && apt-get $quickly install --yes --no-install-recommends $missing; } > /dev/null 2>&1
exit 0
