// Package client asks an admission service whether a key may go on.
//
//	c, err := client.New(client.Config{Servers: []string{"127.0.0.1:4193"}})
//	d := c.Ask(ctx, "user/17", 1)
//	if !d.Admit { ... d.RetryAfter ... }
//
// It asks the server that owns the key over UDP (client.go, link.go), sends a
// question up to five times, each of which the server charges once, and falls back to
// a default reply (attempts.go). Of keys whose rule is leased it holds a part, and decides by
// that without asking (lease.go, Decide). Limit is a net/http middleware (middleware.go).
package client
