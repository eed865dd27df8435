// Command srtm is the operator's tool. It creates, lists, describes and deletes topics,
// lists brokers, places a scenario without a cluster (tools/srtm/plan), and runs a whole
// local cluster (`srtm up`). All requests to a cluster use the public gRPC API.
package main

import (
	"context"
	"os"

	"github.com/srtm-io/srtm/internal/lifecycle"
)

func main() {
	os.Exit(lifecycle.Main("srtm", func(ctx context.Context) error {
		return run(ctx, os.Args[1:], os.Stdin, os.Stdout, os.Stderr)
	}))
}
