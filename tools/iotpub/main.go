// Command iotpub emulates IoT publishers. One process opens thousands of connections and
// sends on a schedule or replays a recording, regardless of the broker's replies. A
// subscriber checks that every accepted message is delivered exactly once. iotpub works
// against any NSQ broker. With a loaddistributor, each publisher connects to its assigned
// broker. Read emulate next.
package main

import (
	"context"
	"os"

	"github.com/srtm-io/srtm/internal/lifecycle"
)

func main() {
	os.Exit(lifecycle.Main("iotpub", func(ctx context.Context) error {
		return execute(ctx, os.Args[1:], os.Stdout, os.Stderr)
	}))
}
