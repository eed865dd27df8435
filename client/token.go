package client

import (
	"fmt"

	"google.golang.org/grpc"

	"github.com/srtm-io/srtm/internal/secure"
)

// Token returns an option for Config.DialOptions. Every call carries the token of a role of
// the loaddistributor's --token-file, in the metadata "authorization" as "Bearer TOKEN".
// Publishers need the role read-only. The token is not encrypted unless the options also
// contain transport credentials with TLS.
func Token(token string) grpc.DialOption {
	return grpc.WithPerRPCCredentials(secure.Bearer(func() string { return token }))
}

// TokenFile is Token with a token from a file. The token has at least 16 bytes, alone in
// the file or in the format of a line of a server's file. The file is read again after a
// change.
func TokenFile(path string) (grpc.DialOption, error) {
	token, err := secure.TokenFile(path)
	if err != nil {
		return nil, fmt.Errorf("client: token: %w", err)
	}
	return grpc.WithPerRPCCredentials(token), nil
}
