//go:build !scribble

package broker

import "github.com/srtm-io/srtm/nsqd/queue"

// poison does nothing: see the build tag scribble.
func poison(*queue.Message) {}
