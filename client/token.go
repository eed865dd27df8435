package client

import (
	"fmt"

	"google.golang.org/grpc"

	"github.com/srtm-io/srtm/internal/secure"
)

// Token returns an option of Config.DialOptions: every call shows the token of a role
// of the loaddistributor's --token-file, in the metadata "authorization" as "Bearer
// TOKEN". Publishers need the role read-only. The token goes in clear unless there are
// transport credentials with TLS among the options, too.
func Token(token string) grpc.DialOption {
	return grpc.WithPerRPCCredentials(secure.Bearer(func() string { return token }))
}

// TokenFile is Token with the one token in a file, of at least 16 bytes, alone or as a
// line of a server's file. The file is read again when it has changed.
func TokenFile(path string) (grpc.DialOption, error) {
	token, err := secure.TokenFile(path)
	if err != nil {
		return nil, fmt.Errorf("client: token: %w", err)
	}
	return grpc.WithPerRPCCredentials(token), nil
}
