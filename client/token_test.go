package client_test

import (
	"context"
	"testing"

	"google.golang.org/grpc"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/client"
	"github.com/srtm-io/srtm/client/fake"
	"github.com/srtm-io/srtm/internal/secure"
	"github.com/srtm-io/srtm/internal/testkit"
)

// A loaddistributor with tokens answers only clients with a token.
func TestTokens(t *testing.T) {
	const token = "look-0123456789abcdef"
	file := testkit.File(t, "tokens", "read-only "+token+"\n")
	guard := testkit.Result(secure.ServerConfig{TokenFile: file}.Load()).Must(t)
	placement := testkit.Result(fake.NewPlacement()).Must(t)
	defer placement.Close()
	server := grpc.NewServer(guard.Options()...)
	srtmv1.RegisterPlacementServiceServer(server, placement)
	address := testkit.Serve(t, server)
	fromFile, err := client.TokenFile(file)
	testkit.Must(t, err)
	if _, err := client.TokenFile(file + "x"); err == nil {
		t.Error("a file that is not there is no fault")
	}
	for name, c := range map[string]struct {
		options []grpc.DialOption
		want    string
	}{
		"none":      {nil, "a token is needed"},
		"another":   {[]grpc.DialOption{client.Token("no-0123456789abcdef")}, "the token is not known"},
		"a token":   {[]grpc.DialOption{client.Token(token)}, client.ErrUnknown.Error()},
		"of a file": {[]grpc.DialOption{fromFile}, client.ErrUnknown.Error()},
	} {
		ctx, cancel := context.WithTimeout(t.Context(), testkit.Hang)
		_, err := client.NewPublisher(ctx, client.Config{Address: address, DialOptions: c.options}, "t", "p")
		cancel()
		testkit.ErrorHas(t, err, c.want, "%s", name)
	}
}
