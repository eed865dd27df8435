package local

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

// natsConfig is a configuration of nats-server. max_payload fits a broker's default
// maximum message.
const natsConfig = `server_name: %q
listen: %q
max_payload: 8MB
jetstream { store_dir: %q }
`

// natsCluster is only for several servers; a single server would wait for others.
const natsCluster = `cluster { name: "srtm", listen: %q, routes: [%s] }
`

// NATS starts n nats-servers with JetStream that find each other and store data in dir.
// NATS does not wait for them: the servers elect a leader once most of them run. urls is
// the value for nsqd's --jetstream-url. After an error nothing keeps running.
func NATS(binary, dir string, n int) (all []*Process, urls string, err error) {
	defer func() {
		if err != nil {
			for _, p := range all {
				err = errors.Join(err, p.Kill())
			}
		}
	}()
	addresses, err := Ports(2 * n)
	if err != nil {
		return nil, "", err
	}
	var routes, clients []string
	for i := range n {
		clients, routes = append(clients, "nats://"+addresses[i]), append(routes, fmt.Sprintf("%q", "nats://"+addresses[n+i]))
	}
	for i := range n {
		name := fmt.Sprintf("nats%d", i+1)
		file := filepath.Join(dir, name+".conf")
		text := fmt.Sprintf(natsConfig, name, addresses[i], filepath.Join(dir, name+"-data"))
		if n > 1 {
			text += fmt.Sprintf(natsCluster, addresses[n+i], strings.Join(routes, ", "))
		}
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			return all, "", fmt.Errorf("%s: %w", name, err)
		}
		p, err := Start(binary, []string{"--config", file}, Options{Log: filepath.Join(dir, name+".log")})
		if err != nil {
			return all, "", err
		}
		p.name = name
		all = append(all, p)
	}
	return all, strings.Join(clients, ","), nil
}
