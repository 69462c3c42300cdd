package systemd_test

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/godbus/dbus/v5"

	"github.com/fairlead/fairlead/internal/systemd"
	"github.com/fairlead/fairlead/internal/testbed"
	booted "github.com/fairlead/fairlead/internal/testbed/systemd"
)

func TestMain(m *testing.M) {
	if file := os.Getenv(leavingEnv); file != "" {
		tellLeaving(file)
		return
	}
	testbed.Main(m)
}

// states are a unit's, as a Bus has reported them.
type states struct {
	mu  sync.Mutex
	all []string
	run string // the last Stopping
}

func (s *states) stopping() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.run
}

func (s *states) report(st systemd.State) {
	s.mu.Lock()
	defer s.mu.Unlock()
	text := st.Active
	if st.Missing {
		text += " missing"
	}
	if st.Err != nil {
		text = "error"
	}
	s.all, s.run = append(s.all, text), st.Stopping
}

func (s *states) list() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.all)
}

// until waits for a last state and returns how long that took.
func (s *states) until(t *testing.T, want string) time.Duration {
	t.Helper()
	begin := time.Now()
	defer func() { t.Logf("%s after %v", want, time.Since(begin)) }()
	testbed.Until(t, "the state "+want, func() error {
		if all := s.list(); len(all) == 0 || all[len(all)-1] != want {
			return fmt.Errorf("the states so far are %q", all)
		}
		return nil
	})
	return time.Since(begin)
}

// newBus runs a bus until the end of the test.
func newBus(t *testing.T) *systemd.Bus {
	t.Helper()
	bus := systemd.NewBus(slog.New(slog.NewTextHandler(t.Output(), nil)))
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		bus.Run(ctx)
	}()
	t.Cleanup(func() {
		cancel()
		<-ended
	})
	return bus
}

// A real systemd: each state of a unit is reported in the moment of its change, and after
// its bus was restarted; what other users of the bus send is not.
func TestUnits(t *testing.T) {
	m := booted.Boot(t, map[string]string{"a.service": "ExecStart=sleep 600", "b.service": "ExecStart=sleep 600"})
	bus := newBus(t)
	var a, missing states
	defer bus.Watch("a.service", a.report)()
	defer bus.Watch("nothing.service", missing.report)()
	a.until(t, "inactive")
	missing.until(t, "inactive missing")
	m.Systemctl("start", "a.service")
	a.until(t, "active")
	m.Systemctl("kill", "--signal=KILL", "a.service")
	t.Logf("failed after %v", a.until(t, "failed").Round(time.Millisecond))
	m.Systemctl("start", "a.service")
	a.until(t, "active")

	spoof(t, "/org/freedesktop/systemd1/unit/a_2eservice", nil)
	gift, err := os.Create(filepath.Join(t.TempDir(), "gift"))
	if err != nil {
		t.Fatal(err)
	}
	defer gift.Close()
	spoof(t, "/a/descriptor", gift)
	m.Systemctl("stop", "a.service")
	a.until(t, "inactive") // all before it was read
	if n := descriptors(t, gift.Name()); n != 1 {
		t.Errorf("a file that another user of the bus has sent is open %d times, want the test's own", n)
	}
	got, want := a.list(), []string{"inactive", "active", "failed", "active", "inactive"}
	if !slices.Equal(without(got, "deactivating", "error"), want) {
		t.Errorf("the states were %q, want %q", got, want)
	}

	m.Systemctl("restart", "dbus.service")
	m.Systemctl("start", "a.service")
	a.until(t, "active")
	m.Systemctl("daemon-reexec")
	m.Systemctl("stop", "a.service")
	a.until(t, "inactive")
	var b states
	stop := bus.Watch("b.service", b.report)
	b.until(t, "inactive")
	stop()
}

func without(list []string, names ...string) []string {
	return slices.DeleteFunc(slices.Clone(list), func(x string) bool { return slices.Contains(names, x) })
}

// descriptors returns how many descriptors of this process are of the file.
func descriptors(t *testing.T, path string) (n int) {
	t.Helper()
	all, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range all {
		if to, err := os.Readlink("/proc/self/fd/" + e.Name()); err == nil && to == path {
			n++
		}
	}
	return n
}

// spoof sends what looks like a unit's change, to all and to each receiver alone; with a
// file, if there is one.
func spoof(t *testing.T, path dbus.ObjectPath, file *os.File) {
	t.Helper()
	conn, err := dbus.ConnectSystemBus()
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	var names []string
	if err := conn.BusObject().Call("org.freedesktop.DBus.ListNames", 0).Store(&names); err != nil {
		t.Fatal(err)
	}
	for _, to := range append(names, "") {
		if file != nil && (to == conn.Names()[0] || !strings.HasPrefix(to, ":")) {
			continue // the sender would get its own file
		}
		msg := &dbus.Message{Type: dbus.TypeSignal, Headers: map[dbus.HeaderField]dbus.Variant{
			dbus.FieldPath:      dbus.MakeVariant(path),
			dbus.FieldInterface: dbus.MakeVariant("org.freedesktop.DBus.Properties"),
			dbus.FieldMember:    dbus.MakeVariant("PropertiesChanged"),
			dbus.FieldSignature: dbus.MakeVariant(dbus.SignatureOf("", map[string]dbus.Variant{}, []string{})),
		}, Body: []any{
			"org.freedesktop.systemd1.Unit", map[string]dbus.Variant{"ActiveState": dbus.MakeVariant("failed")}, []string{},
		}}
		if file != nil {
			msg.Headers[dbus.FieldSignature] = dbus.MakeVariant(dbus.SignatureOf(dbus.UnixFD(0)))
			msg.Body = []any{dbus.UnixFD(file.Fd())}
		}
		if to != "" {
			msg.Headers[dbus.FieldDestination] = dbus.MakeVariant(to)
		}
		conn.Send(msg, nil)
	}
	// A call behind them: the bus has passed them on.
	if err := conn.BusObject().Call("org.freedesktop.DBus.GetId", 0).Err; err != nil {
		t.Fatal(err)
	}
}
