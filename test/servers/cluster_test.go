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
		c := embed.NewConfig()
		c.Name, c.Dir = fmt.Sprintf("m%d", i), t.TempDir()
		c.ListenClientUrls = []url.URL{{Scheme: "http", Host: "127.0.0.1:0"}}
		c.AdvertiseClientUrls = c.ListenClientUrls
		c.ListenPeerUrls, c.AdvertisePeerUrls = peers[i:i+1], peers[i:i+1]
		c.InitialCluster = strings.Join(initial, ",")
		c.UnsafeNoFsync = true
		c.ZapLoggerBuilder = embed.NewZapLoggerBuilder(zap.NewNop())
		e, err := embed.StartEtcd(c)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(e.Close)
		started = append(started, e)
	}
	for _, e := range started {
		select {
		case <-e.Server.ReadyNotify():
		case <-time.After(time.Minute):
			t.Fatal("etcd is not ready after a minute")
		}
		s.urls = append(s.urls, "http://"+e.Clients[0].Addr().String())
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

// newServer is one API server, on ports of its own.
func newServer(t *testing.T, s *store, flags ...string) *process.Server {
	return process.NewServer(nil, process.Program("fairlead"), filepath.Join(t.TempDir(), "data"), append([]string{
		"--controllers", "none", "--etcd-servers", strings.Join(s.urls, ","),
		"--bind-address", "127.0.0.1", "--secure-port", strconv.Itoa(process.FreePort(t)),
		"--service-write-timeout", writeTimeout.String(), "--allocation-repair-period", repairPeriod.String(),
	}, flags...)...)
}
