// Package x imports sideways and a foreign package.
package x

import (
	_ "net/http/pprof"

	_ "fixture.test/m/lower/y"
)
