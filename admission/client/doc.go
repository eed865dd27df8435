// Package client asks an admission service whether a key may go on.
//
//	c, err := client.New(client.Config{Servers: []string{"127.0.0.1:4193"}})
//	d := c.Ask(ctx, "user/17", 1)
//	if !d.Admit { ... d.RetryAfter ... }
//
// The client asks the server that owns the key over UDP (client.go, link.go). It sends a question
// up to five times (attempts.go), and the server charges the question once. While a server looks
// the key up, the client waits up to Config.Wait. Otherwise the client falls
// back to a default reply, and tells the server of a denial. Limit is a net/http middleware
// (middleware.go).
package client
