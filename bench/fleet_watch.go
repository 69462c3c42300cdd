package main

import (
	"bufio"
	"bytes"
	"crypto/tls"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"slices"
	"strconv"
	"sync"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
)

// watchCommand is the argument with which this program is the watches of many nodes
// instead: `bench watches KUBECONFIG NODES WATCHES-PER-CONNECTION`. It is its own process so that what the
// nodes need is not counted, and it decodes nothing: a fleet has a processor for each
// node, and a bench has not.
const watchCommand = "watches"

const (
	watchQuery   = "?watch=true&allowWatchBookmarks=true&sendInitialEvents=true&resourceVersionMatch=NotOlderThan"
	slicesPath   = "/apis/discovery.k8s.io/v1/endpointslices" + watchQuery
	servicesPath = "/api/v1/services" + watchQuery
	// fleetWindow is what the server may send before it must wait for the client.
	fleetWindow = 1 << 30
	// bookmarkSize is more than a bookmark has, and less than a slice of 100 endpoints.
	bookmarkSize = 1 << 10
	// initialEnd is the annotation of the bookmark after the objects that there are.
	initialEnd = "k8s.io/initial-events-end"
)

// fleetReport is one line of the process: all nodes have the lists, or a change.
type fleetReport struct {
	Begin, Median, Last time.Time
	Bytes               int64 // of TLS that came since the one before
}

// watches are the watches of all nodes. A node has one of EndpointSlices and one of Services.
type watches struct {
	config *rest.Config
	tls    *tls.Config
	host   string
	begin  time.Time

	mu    sync.Mutex
	seen  []time.Time // when each had what is waited for
	want  int         // how many that will be
	nodes int
	bytes int64
	out   *json.Encoder
}

// watchFleet opens the watches and reports until its input ends.
func watchFleet(kubeconfig, count, shared string) error {
	nodes, err := strconv.Atoi(count)
	perConnection, err2 := strconv.Atoi(shared)
	if err := errors.Join(err, err2); err != nil {
		return err
	}
	config, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err != nil {
		return err
	}
	u, err := url.Parse(config.Host)
	if err != nil {
		return err
	}
	t, err := rest.TLSConfigFor(config)
	if err != nil {
		return err
	}
	t.NextProtos = []string{"h2"}
	if t.ServerName == "" {
		t.ServerName = u.Hostname()
	}
	w := &watches{config: config, tls: t, host: u.Host, begin: time.Now(), nodes: nodes, want: 2 * nodes, out: json.NewEncoder(os.Stdout)}
	failed := make(chan error, 1)
	for first := 0; first < 2*nodes; first += perConnection {
		go func() { failed <- w.keep(min(perConnection, 2*nodes-first)) }()
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_, _ = io.Copy(io.Discard, os.Stdin)
	}()
	select {
	case <-ended:
		return nil
	case err := <-failed:
		return err
	}
}

// event notes that a watch has its lists or a change, and reports when all have.
func (w *watches) event(at time.Time) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.seen = append(w.seen, at); len(w.seen) < w.want {
		return
	}
	slices.SortFunc(w.seen, time.Time.Compare)
	_ = w.out.Encode(fleetReport{Begin: w.begin, Median: w.seen[(len(w.seen)-1)/2], Last: w.seen[len(w.seen)-1], Bytes: w.bytes})
	w.seen, w.want, w.bytes = w.seen[:0], w.nodes, 0
}

// counted is a connection whose bytes count.
type counted struct {
	net.Conn
	w *watches
}

// Read reads and counts.
func (c counted) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	c.w.mu.Lock()
	defer c.w.mu.Unlock()
	c.w.bytes += int64(n)
	return n, err
}

// fleetConn is a connection with the watches of some nodes.
type fleetConn struct {
	*watches
	out     *bufio.Writer
	framer  *http2.Framer
	block   bytes.Buffer
	encoder *hpack.Encoder // into block
	streams map[uint32]*eventReader
	next    uint32 // stream
	heard   bool   // a watch was answered
}

// keep connects n watches, and again as a node does while the server ends the connection
// before it has sent anything: one under load may not get to the first frames in time.
func (w *watches) keep(n int) error {
	for {
		heard, err := w.connect(n)
		if heard || time.Since(w.begin) > fleetLimit {
			return err
		}
	}
}

// connect opens a connection with n watches and reads it to its end. It reports whether a
// watch was answered.
func (w *watches) connect(n int) (heard bool, err error) {
	raw, err := net.Dial("tcp", w.host)
	if err != nil {
		return true, err
	}
	defer raw.Close()
	conn := tls.Client(counted{raw, w}, w.tls)
	c := &fleetConn{watches: w, out: bufio.NewWriter(conn), streams: map[uint32]*eventReader{}, next: 1}
	c.encoder = hpack.NewEncoder(&c.block)
	c.framer = http2.NewFramer(c.out, bufio.NewReaderSize(conn, 64<<10))
	c.framer.SetReuseFrames()
	c.framer.ReadMetaHeaders = hpack.NewDecoder(4096, nil)
	if _, err := c.out.WriteString(http2.ClientPreface); err != nil {
		return false, err
	}
	if err := errors.Join(
		c.framer.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: fleetWindow}),
		c.framer.WriteWindowUpdate(0, fleetWindow)); err != nil {
		return false, err
	}
	for i := range n {
		path := slicesPath
		if i%2 == 1 {
			path = servicesPath
		}
		if err := c.open(&eventReader{path: path}); err != nil {
			return false, err
		}
	}
	if err := c.out.Flush(); err != nil {
		return false, err
	}
	err = c.read()
	return c.heard, err
}

// open sends the request for a watch.
func (c *fleetConn) open(r *eventReader) error {
	c.block.Reset()
	fields := []hpack.HeaderField{
		{Name: ":method", Value: http.MethodGet}, {Name: ":scheme", Value: "https"}, {Name: ":authority", Value: c.host},
		{Name: ":path", Value: r.path}, {Name: "accept", Value: "application/vnd.kubernetes.protobuf;stream=watch"},
		{Name: "user-agent", Value: "fairlead-bench"},
	}
	if c.config.BearerToken != "" {
		fields = append(fields, hpack.HeaderField{Name: "authorization", Value: "Bearer " + c.config.BearerToken})
	}
	for _, f := range fields {
		_ = c.encoder.WriteField(f) // into a buffer
	}
	id := c.next
	c.next += 2
	c.streams[id] = r
	return c.framer.WriteHeaders(http2.HeadersFrameParam{
		StreamID: id, BlockFragment: c.block.Bytes(), EndStream: true, EndHeaders: true,
	})
}

// again opens a watch that the server has ended before it sent the lists, as a node does:
// a server under load may reject a request because its cache is older than the store.
func (c *fleetConn) again(id uint32) error {
	r := c.streams[id]
	if r == nil || r.synced {
		return errors.New("the server ended a watch")
	}
	delete(c.streams, id)
	return c.open(&eventReader{path: r.path})
}

// read reads frames until the connection ends.
func (c *fleetConn) read() error {
	for unread := uint32(0); ; {
		frame, err := c.framer.ReadFrame()
		if err != nil {
			return err
		}
		switch f := frame.(type) {
		case *http2.DataFrame:
			if s := c.streams[f.StreamID]; s != nil {
				s.read(f.Data(), c.event)
			}
			if unread += f.Length; unread > fleetWindow/2 {
				err, unread = c.framer.WriteWindowUpdate(0, unread), 0
			}
			if f.StreamEnded() {
				err = errors.Join(err, c.again(f.StreamID))
			}
		case *http2.MetaHeadersFrame:
			c.heard = true
			if f.PseudoValue("status") != "200" {
				err = fmt.Errorf("a watch was answered %s", f.PseudoValue("status"))
			}
		case *http2.SettingsFrame:
			if !f.IsAck() {
				err = c.framer.WriteSettingsAck()
			}
		case *http2.PingFrame:
			if !f.IsAck() {
				err = c.framer.WritePing(true, f.Data)
			}
		case *http2.RSTStreamFrame:
			err = fmt.Errorf("a watch was ended: %s", f.ErrCode)
		case *http2.GoAwayFrame:
			err = fmt.Errorf("the server ends the connection: %s", f.ErrCode)
		}
		if err = errors.Join(err, c.out.Flush()); err != nil {
			return err
		}
	}
}

// eventReader finds where the events of one watch end: each is behind its length, four
// bytes of it.
type eventReader struct {
	path   string // of the request
	head   []byte // of the length, or of an event small enough for a bookmark
	length uint32 // of the event, 0 while its length is read
	left   uint32
	synced bool // has the lists
}

// read takes the next bytes of the stream. done is called for the end of the lists, and
// for each change after it.
func (r *eventReader) read(p []byte, done func(time.Time)) {
	for len(p) > 0 {
		if r.length == 0 {
			n := min(4-len(r.head), len(p))
			r.head, p = append(r.head, p[:n]...), p[n:]
			if len(r.head) == 4 {
				r.length = binary.BigEndian.Uint32(r.head)
				r.left, r.head = r.length, r.head[:0]
			}
			continue
		}
		n := min(int(r.left), len(p))
		if r.length <= bookmarkSize && !r.synced {
			r.head = append(r.head, p[:n]...)
		}
		p = p[n:]
		if r.left -= uint32(n); r.left > 0 {
			continue
		}
		switch {
		case r.synced && r.length > bookmarkSize:
			done(time.Now())
		case !r.synced && bytes.Contains(r.head, []byte(initialEnd)):
			r.synced = true
			done(time.Now())
		}
		r.length, r.head = 0, r.head[:0]
	}
}
