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
