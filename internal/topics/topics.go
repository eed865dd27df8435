// Package topics has the common code of the admin API's clients, srtm and the console:
// creating a topic, whose answer comes in steps, and formatting the API's values for
// people (text.go).
package topics

import (
	"context"
	"errors"
	"io"

	"google.golang.org/grpc"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
)

// Pages requests the pages of a list, one after the other, until the last page.
func Pages(ask func(token string) (next string, err error)) error {
	for token := ""; ; {
		next, err := ask(token)
		if err != nil || next == "" {
			return err
		}
		token = next
	}
}

// Create follows a creation to its end and returns the final topic. each, unless nil,
// receives every earlier step.
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
