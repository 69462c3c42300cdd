package servers

import (
	"fmt"
	"net/url"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/server/v3/embed"
	"go.uber.org/zap"

	"github.com/fairlead/fairlead/internal/testbed/etcd"
	"github.com/fairlead/fairlead/internal/testbed/process"
)

// store is an etcd cluster with all its members in this process, on loopback.
type store struct {
	urls   []string
	client *clientv3.Client
}

func startStore(t *testing.T, members int) *store {
	t.Helper()
	peers := make([]url.URL, members)
	var initial []string
	for i := range peers {
		peers[i] = url.URL{Scheme: "http", Host: "127.0.0.1:" + strconv.Itoa(process.FreePort(t))}
		initial = append(initial, fmt.Sprintf("m%d=%s", i, peers[i].String()))
	}
	s := &store{}
	var started []*embed.Etcd
	for i := range members {
		e := etcd.Launch(t, func(c *embed.Config) {
			c.Name, c.ListenPeerUrls, c.InitialCluster = fmt.Sprintf("m%d", i), peers[i:i+1], strings.Join(initial, ",")
			c.TickMs, c.ElectionMs = 100, 1000 // etcd's own
		})
		t.Cleanup(e.Close)
		started = append(started, e)
	}
	for _, e := range started {
		etcd.AwaitReady(t, e)
		s.urls = append(s.urls, etcd.URL(e))
	}
	var err error
	if s.client, err = clientv3.New(clientv3.Config{Endpoints: s.urls, Logger: zap.NewNop()}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.client.Close() })
	return s
}

// limits make what a kill leaves behind free again soon.
const (
	writeTimeout = 3 * time.Second
	repairPeriod = 2 * time.Second
)

// newServer is one API server, on its own ports.
func newServer(t *testing.T, s *store, flags ...string) *process.Server {
	return process.NewServer(nil, process.Program("fairlead"), filepath.Join(t.TempDir(), "data"), append([]string{
		"--controllers", "none", "--etcd-servers", strings.Join(s.urls, ","),
		"--bind-address", "127.0.0.1", "--secure-port", strconv.Itoa(process.FreePort(t)),
		"--service-write-timeout", writeTimeout.String(), "--allocation-repair-period", repairPeriod.String(),
	}, flags...)...)
}
