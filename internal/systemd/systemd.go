// Package systemd follows the state of units over D-Bus
// (https://www.freedesktop.org/software/systemd/man/org.freedesktop.systemd1.html).
package systemd

import (
	"cmp"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/godbus/dbus/v5"

	"github.com/fairlead/fairlead/internal/loop"
)

// State is the last known state of a unit.
type State struct {
	// Active is the unit's ActiveState, such as active, failed or deactivating; empty
	// where Err is set.
	Active string
	// Stopping is the ID of the unit's run, $INVOCATION_ID of its processes (systemd.exec(5)),
	// while it is deactivating, else empty.
	Stopping string
	// Missing reports that systemd has no file of this unit.
	Missing bool
	// Err is why nothing is known about the unit.
	Err error
}

// Up reports whether the unit does what it is for.
func (s State) Up() bool {
	return s.Active == "active" || s.Active == "reloading" || s.Active == "refreshing"
}

const (
	destination    = "org.freedesktop.systemd1"
	managerPath    = "/org/freedesktop/systemd1"
	manager        = destination + ".Manager"
	unitInterface  = destination + ".Unit"
	properties     = busName + ".Properties"
	busName        = "org.freedesktop.DBus"
	busAddress     = "unix:path=/var/run/dbus/system_bus_socket"
	changedSignal  = properties + ".PropertiesChanged"
	privateAddress = "unix:path=/run/systemd/private"
)

const (
	// callTimeout bounds a call, and the time to connect.
	callTimeout = 5 * time.Second
	// leavingTimeout bounds the questions of a process that is told to end.
	leavingTimeout = time.Second
	minRetry       = 100 * time.Millisecond
	maxRetry       = 5 * time.Second
	// resync is how often all units are read again: a signal may be lost with a
	// manager that is executed again.
	resync = 10 * time.Second
)

// Bus follows units over one connection, which it has while units are watched.
type Bus struct {
	log  *slog.Logger
	wake loop.Signal

	mu      sync.Mutex
	watches map[*watch]bool
}

// watch is a unit that is followed.
type watch struct {
	unit   string
	report func(State)
	// path is that of the unit's object on the present connection. It belongs to the
	// goroutine of Run, as all below.
	path dbus.ObjectPath
	run  string // State.Stopping, when it stops
	last *State
}

// NewBus returns a Bus for Run.
func NewBus(log *slog.Logger) *Bus {
	return &Bus{log: log, wake: loop.NewSignal(), watches: map[*watch]bool{}}
}

// Watch has report called with the state of a unit, and with each further one, until
// stop is called; one call may still be going on then. A lost connection is made again
// and is no state: it is reported as State.Err only before the first state. What systemd
// answers about the unit itself is, at any time. report must not block.
func (b *Bus) Watch(unit string, report func(State)) (stop func()) {
	w := &watch{unit: unit, report: report}
	b.mu.Lock()
	b.watches[w] = true
	b.mu.Unlock()
	b.wake.Set()
	return func() {
		b.mu.Lock()
		delete(b.watches, w)
		b.mu.Unlock()
		b.wake.Set()
	}
}

func (b *Bus) all() []*watch {
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.Collect(maps.Keys(b.watches))
}

// Run connects while units are watched, until ctx ends.
func (b *Bus) Run(ctx context.Context) {
	retry := minRetry
	for ctx.Err() == nil {
		if len(b.all()) == 0 {
			select {
			case <-ctx.Done():
				return
			case <-b.wake:
			}
			continue
		}
		begin := time.Now()
		err := b.serve(ctx)
		if err == nil || ctx.Err() != nil {
			continue // no unit is watched any more
		}
		for _, w := range b.all() {
			if w.last == nil {
				w.tell(State{Err: err})
				w.last = nil
			}
		}
		if time.Since(begin) > maxRetry {
			retry = minRetry
		}
		b.log.Warn("cannot follow systemd's units; retrying", "err", err, "after", retry)
		select {
		case <-ctx.Done():
		case <-time.After(retry):
		}
		retry = min(2*retry, maxRetry)
	}
}

// serve follows the units over one connection. It returns nil when none is watched.
func (b *Bus) serve(ctx context.Context) error {
	conn, err := connect(ctx)
	if err != nil {
		return err
	}
	defer conn.Close()
	signals := make(chan *dbus.Signal, 64)
	conn.Signal(signals)
	owner, err := subscribe(ctx, conn)
	if err != nil {
		return err
	}
	if err := b.read(ctx, conn, false); err != nil {
		return err
	}
	tick := time.NewTicker(resync)
	defer tick.Stop()
	for {
		var err error
		select {
		case <-ctx.Done():
			return nil
		case <-conn.Context().Done():
			return errors.New("systemd or its bus has ended the connection")
		case s, ok := <-signals:
			if !ok {
				return errors.New("systemd or its bus has ended the connection")
			}
			switch {
			case s.Sender == busName && s.Name == busName+".NameOwnerChanged" && len(s.Body) > 0 && s.Body[0] == destination:
				return errors.New("systemd was executed again")
			case s.Sender == owner:
				err = b.changed(ctx, conn, s)
			}
		case <-b.wake:
			if len(b.all()) == 0 {
				return nil
			}
			err = b.read(ctx, conn, true)
		case <-tick.C:
			if now, _ := ownerOf(ctx, conn); now != owner {
				return errors.New("systemd has another connection to its bus")
			}
			err = b.read(ctx, conn, false)
		}
		if err != nil {
			return err
		}
	}
}

// subscribe asks for signals. It returns the name of systemd on the bus: every client of a
// bus may send signals that look like systemd's. Where systemd itself is at the other end,
// all its signals come, without a name.
func subscribe(ctx context.Context, conn *dbus.Conn) (owner string, err error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	if owner, err = ownerOf(ctx, conn); owner == "" || err != nil {
		return "", err
	}
	err = conn.AddMatchSignalContext(ctx, dbus.WithMatchSender(destination), dbus.WithMatchInterface(properties),
		dbus.WithMatchMember("PropertiesChanged"), dbus.WithMatchPathNamespace(managerPath+"/unit"))
	if err == nil {
		err = conn.AddMatchSignalContext(ctx, dbus.WithMatchSender(busName), dbus.WithMatchInterface(busName),
			dbus.WithMatchMember("NameOwnerChanged"), dbus.WithMatchArg(0, destination))
	}
	if err != nil {
		return "", fmt.Errorf("ask for systemd's signals: %w", err)
	}
	var answer dbus.Error
	err = conn.Object(destination, managerPath).CallWithContext(ctx, manager+".Subscribe", 0).Err
	if err != nil && (!errors.As(err, &answer) || answer.Name != destination+".AlreadySubscribed") {
		return "", fmt.Errorf("subscribe to systemd: %w", err)
	}
	return owner, nil
}

// ownerOf returns the name of systemd's connection to the bus; empty where there is no bus.
func ownerOf(ctx context.Context, conn *dbus.Conn) (owner string, err error) {
	if len(conn.Names()) == 0 {
		return "", nil
	}
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	if err := conn.BusObject().CallWithContext(ctx, busName+".GetNameOwner", 0, destination).Store(&owner); err != nil {
		return "", fmt.Errorf("find systemd on its bus: %w", err)
	}
	return owner, nil
}

// connect connects to the system bus, or as root to systemd itself.
func connect(ctx context.Context) (*dbus.Conn, error) {
	address := cmp.Or(os.Getenv("DBUS_SYSTEM_BUS_ADDRESS"), busAddress)
	conn, busErr := open(ctx, address, (*dbus.Conn).Hello)
	if busErr == nil || os.Geteuid() != 0 {
		return conn, busErr
	}
	conn, err := open(ctx, privateAddress, nil)
	if err != nil {
		return nil, fmt.Errorf("reach systemd: %w; %w", busErr, err)
	}
	return conn, nil
}

// open dials and authenticates within callTimeout. The socket is not the library's own:
// that one takes file descriptors with messages and never closes them, and every user of
// the bus may send some (godbus v5.1.0, transport_unix.go). Of others it asks for none.
func open(ctx context.Context, address string, hello func(*dbus.Conn) error) (*dbus.Conn, error) {
	live, end := context.WithCancel(ctx)
	late := time.AfterFunc(callTimeout, end)
	defer late.Stop()
	socket, err := dial(live, address)
	if err != nil {
		end()
		return nil, err
	}
	conn, err := dbus.NewConn(socket, dbus.WithSignalHandler(dbus.NewSequentialSignalHandler()), dbus.WithContext(live))
	if err != nil {
		end()
		_ = socket.Close()
		return nil, err
	}
	if err = conn.Auth([]dbus.Auth{dbus.AuthExternal(strconv.Itoa(os.Geteuid()))}); err == nil && hello != nil {
		err = hello(conn)
	}
	if err != nil {
		end()
		_ = conn.Close()
		return nil, err
	}
	go func() { // ends with the connection
		<-conn.Context().Done()
		end()
	}()
	return conn, nil
}

// dial connects to the first of the addresses that answers
// (https://dbus.freedesktop.org/doc/dbus-specification.html#addresses).
func dial(ctx context.Context, addresses string) (net.Conn, error) {
	var errs []error
	for address := range strings.SplitSeq(addresses, ";") {
		path := ""
		if list, ok := strings.CutPrefix(address, "unix:"); ok {
			for option := range strings.SplitSeq(list, ",") {
				key, value, _ := strings.Cut(option, "=")
				value, err := dbus.UnescapeBusAddressValue(value)
				switch {
				case err != nil:
				case key == "path":
					path = value
				case key == "abstract":
					path = "@" + value
				}
			}
		}
		if path == "" {
			errs = append(errs, fmt.Errorf("the bus address %q: want unix:path=PATH or unix:abstract=NAME", address))
			continue
		}
		var d net.Dialer
		conn, err := d.DialContext(ctx, "unix", path)
		if err == nil {
			return conn, nil
		}
		errs = append(errs, err)
	}
	return nil, errors.Join(errs...)
}

// read reads the units, or only the new ones.
func (b *Bus) read(ctx context.Context, conn *dbus.Conn, fresh bool) error {
	for _, w := range b.all() {
		if fresh && w.last != nil && w.path != "" {
			continue
		}
		s, err := w.read(ctx, conn)
		if err != nil {
			return err
		}
		w.tell(s)
	}
	return nil
}

// read asks for the state of the unit, which systemd loads for that.
func (w *watch) read(ctx context.Context, conn *dbus.Conn) (State, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	var all map[string]dbus.Variant
	err := conn.Object(destination, managerPath).CallWithContext(ctx, manager+".LoadUnit", 0, w.unit).Store(&w.path)
	if err == nil {
		err = conn.Object(destination, w.path).CallWithContext(ctx, properties+".GetAll", 0, unitInterface).Store(&all)
	}
	var answer dbus.Error
	if errors.As(err, &answer) {
		return State{Err: fmt.Errorf("systemd about %s: %w", w.unit, err)}, nil
	}
	if err != nil {
		return State{}, fmt.Errorf("ask systemd for %s: %w", w.unit, err)
	}
	active, _ := all["ActiveState"].Value().(string)
	load, _ := all["LoadState"].Value().(string)
	s := w.state(active, all)
	s.Missing = load == "not-found"
	return s, nil
}

// state returns the State of a unit from its properties, or from the changed ones.
func (w *watch) state(active string, properties map[string]dbus.Variant) State {
	if id, ok := properties["InvocationID"].Value().([]byte); ok {
		w.run = hex.EncodeToString(id)
	}
	if active == "deactivating" {
		return State{Active: active, Stopping: w.run}
	}
	return State{Active: active}
}

// changed follows up on a signal.
func (b *Bus) changed(ctx context.Context, conn *dbus.Conn, s *dbus.Signal) error {
	if s.Name != changedSignal || len(s.Body) < 2 || s.Body[0] != unitInterface {
		return nil
	}
	values, _ := s.Body[1].(map[string]dbus.Variant)
	for _, w := range b.all() {
		if w.path != s.Path {
			continue
		}
		if active, ok := values["ActiveState"].Value().(string); ok {
			w.tell(w.state(active, values))
			continue
		}
		if !invalidated(s, "ActiveState") {
			continue
		}
		now, err := w.read(ctx, conn)
		if err != nil {
			return err
		}
		w.tell(now)
	}
	return nil
}

// invalidated reports whether a signal announces a change of a property without its new value.
func invalidated(s *dbus.Signal, property string) bool {
	if len(s.Body) < 3 {
		return false
	}
	names, _ := s.Body[2].([]string)
	return slices.Contains(names, property)
}

func (w *watch) tell(s State) {
	if w.last != nil && *w.last == s {
		return
	}
	w.last = &s
	w.report(s)
}
