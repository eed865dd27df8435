// Package habits has bad ones.
package habits

import (
	"math/rand/v2"
	web "net/http"
	"time"
)

// Serve serves all that anybody registered.
func Serve() (web.Handler, int) {
	time.Sleep(1)
	return web.DefaultServeMux, rand.IntN(3) // want "net/http.DefaultServeMux" // want "math/rand/v2.IntN"
}
