// Package topics is what the clients of the admin API have in common, srtm and the console:
// how to ask for a topic, whose answer comes in steps, and how values of the API are
// written for people (text.go).
package topics

import (
	"context"
	"errors"
	"io"

	"google.golang.org/grpc"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
)

// Pages asks for one page after the other of a list, until one says that no more follow.
func Pages(ask func(token string) (next string, err error)) error {
	for token := ""; ; {
		next, err := ask(token)
		if err != nil || next == "" {
			return err
		}
		token = next
	}
}

// Create follows a creation to its end, and returns the topic as it is then. each, unless
// nil, is told of every step before.
func Create(ctx context.Context, admin srtmv1.AdminServiceClient, request *srtmv1.CreateTopicRequest, each func(*srtmv1.CreateTopicResponse), options ...grpc.CallOption) (*srtmv1.Topic, error) {
	stream, err := admin.CreateTopic(ctx, request, options...)
	if err != nil {
		return nil, err
	}
	for {
		r, err := stream.Recv()
		switch {
		case errors.Is(err, io.EOF):
			return nil, errors.New("the loaddistributor ended the call without the topic")
		case err != nil || r.GetTopic() != nil:
			return r.GetTopic(), err
		case each != nil:
			each(r)
		}
	}
}
