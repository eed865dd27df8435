package broker_test

import (
	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
)

// told are channels as the control plane names them, created at version 1.
func told(names ...string) (channels []*srtmv1.TopicChannel) {
	for _, name := range names {
		channels = append(channels, &srtmv1.TopicChannel{Name: name, Created: 1})
	}
	return channels
}
