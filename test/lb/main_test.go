// Package lb has the tests of speakers as processes on hosts of a network: what an
// outside machine sees while they are killed, stopped, cut off and started again.
package lb

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"os/signal"
	"syscall"
	"testing"
	"time"

	"k8s.io/client-go/rest"

	"github.com/fairlead/fairlead/internal/kernel/clock"
	"github.com/fairlead/fairlead/internal/lb"
	"github.com/fairlead/fairlead/internal/lb/front"
	"github.com/fairlead/fairlead/internal/lb/proxied"
	"github.com/fairlead/fairlead/internal/lb/proxied/web"
	v1 "github.com/fairlead/fairlead/internal/lb/v1"
	"github.com/fairlead/fairlead/internal/systemd"
	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/process"
)

// speakerEnv makes this program a speaker.
const speakerEnv = "FAIRLEAD_TEST_LB_SPEAKER"

func TestMain(m *testing.M) {
	if text := os.Getenv(speakerEnv); text != "" {
		if err := speak(text); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	process.Main(func() int {
		flag.Parse()
		if err := flag.Set("test.parallel", "99"); err != nil { // see inParallel
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		return testbed.Run(m)
	}, "fairlead", "backend", "kubectl")
}

// slots are how many tests run at a time, beside the one that takes a minute: they have their own networks
// and mostly wait.
var slots = make(chan struct{}, 3)

// inParallel is testing.T.Parallel for all tests but that of a minute, which has no slot and so begins at once,
// whatever the order in which tests are released.
func inParallel(t *testing.T) {
	t.Helper()
	t.Parallel()
	slots <- struct{}{}
	t.Cleanup(func() { <-slots })
}

// speakerArgs are the options of a speaker process.
type speakerArgs struct {
	Host, ServerName, CA, Cert, Key, Token string
	Node                                   string
	Peer                                   netip.AddrPort
	// Rate is how fast its clock goes.
	Rate float64
	// Announce is how it announces, arp by default.
	Announce string
	// Interfaces are those to announce at.
	Interfaces []string
	// Unhealthy is a file that makes the proxy unhealthy while it exists.
	Unhealthy string
}

func (a *speakerArgs) setServer(c *rest.Config) {
	a.Host, a.ServerName, a.Token = c.Host, c.ServerName, c.BearerToken
	a.CA, a.Cert, a.Key = string(c.CAData), string(c.CertData), string(c.KeyData)
}

// speak is a speaker process.
func speak(text string) error {
	var a speakerArgs
	if err := json.Unmarshal([]byte(text), &a); err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	fmt.Fprintln(os.Stderr, "started") // from here on SIGTERM ends it in order
	defer stop()
	o := lb.SpeakerOptions{
		Config: &rest.Config{Host: a.Host, BearerToken: a.Token, Timeout: 0, TLSClientConfig: rest.TLSClientConfig{
			ServerName: a.ServerName, CAData: []byte(a.CA), CertData: []byte(a.Cert), KeyData: []byte(a.Key),
		}},
		NodeName: a.Node, Peer: a.Peer, Announce: a.Announce, Interfaces: a.Interfaces,
		Healthy: func(context.Context) (bool, string) {
			_, err := os.Stat(a.Unhealthy)
			return err != nil, "the test says so"
		},
		Now: func() time.Duration { return time.Duration(float64(clock.Boot()) * a.Rate) },
		Log: slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelDebug})),
	}
	store, err := systemd.OpenFileStore()
	if err != nil {
		return err
	}
	if store != nil {
		o.Store = store
	}
	if a.Announce == v1.AnnounceNone {
		l, err := front.NewListening(o.Config, front.Options{NodeName: o.NodeName, Log: o.Log, AccessLogs: o.AccessLogs, UploadLogs: o.UploadLogs,
			Server: proxied.New(proxied.Options{Log: o.Log, AccessLogs: o.AccessLogs, Node: o.NodeName, Store: o.Store, Engine: web.Start}),
		})
		if err != nil {
			return err
		}
		return l.Run(ctx)
	}
	s, err := lb.NewSpeaker(o)
	if err != nil {
		return err
	}
	return s.Run(ctx)
}
