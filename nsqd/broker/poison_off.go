//go:build !poison

package broker

import "github.com/srtm-io/srtm/nsqd/queue"

// poison does nothing without the build tag poison.
func poison(*queue.Message) {}
