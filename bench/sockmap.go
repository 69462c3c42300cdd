package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"
)

// The ports of the two servers: only connections to the second are joined.
const (
	plainPort  = 9381
	joinedPort = 9382
	// joinedMost bounds the sockets that are joined at once.
	joinedMost = 1 << 14
)

// joiner is what joins both sockets of each connection to joinedPort, and hands over what one of them sends to the other, without
// the way through TCP and IP: two BPF programs around a map of sockets. They are for processes of a control group.
type joiner struct {
	sockets           *ebpf.Map
	noting, directing *ebpf.Program
	noted             link.Link
}

// The fields of struct bpf_sock_ops and struct sk_msg_md (linux/bpf.h) that the programs read. A remote port has the order of the
// network in four bytes, a local one that of the machine.
const (
	opsOp, opsFamily, opsRemotePort, opsLocalPort = 0, 20, 64, 68
	msgRemotePort, msgLocalPort                   = 60, 64
)

// join attaches the programs to a control group.
func join(group string) (j *joiner, err error) {
	j = &joiner{}
	defer func() {
		if err != nil {
			err = errors.Join(err, j.close())
		}
	}()
	j.sockets, err = ebpf.NewMap(&ebpf.MapSpec{Name: "joined", Type: ebpf.SockHash, KeySize: 4, ValueSize: 8, MaxEntries: joinedMost})
	if err != nil {
		return j, fmt.Errorf("make a map of sockets: %w", err)
	}
	if j.noting, err = ebpf.NewProgram(noteSockets(j.sockets)); err != nil {
		return j, fmt.Errorf("load the program that notes sockets: %w", err)
	}
	if j.directing, err = ebpf.NewProgram(directMessages(j.sockets)); err != nil {
		return j, fmt.Errorf("load the program that directs messages: %w", err)
	}
	err = link.RawAttachProgram(link.RawAttachProgramOptions{Target: j.sockets.FD(), Program: j.directing, Attach: ebpf.AttachSkMsgVerdict})
	if err != nil {
		return j, fmt.Errorf("attach a program to the map of sockets: %w", err)
	}
	j.noted, err = link.AttachCgroup(link.CgroupOptions{Path: group, Attach: ebpf.AttachCGroupSockOps, Program: j.noting})
	return j, err
}

func (j *joiner) close() error {
	var errs []error
	if j.noted != nil {
		errs = append(errs, j.noted.Close())
	}
	for _, p := range []*ebpf.Program{j.noting, j.directing} {
		if p != nil {
			errs = append(errs, p.Close())
		}
	}
	if j.sockets != nil {
		errs = append(errs, j.sockets.Close())
	}
	return errors.Join(errs...)
}

// A socket's key is the port of its connection's client, twice, and one more for the server's end. That is enough for connections of
// one client's host with one server.
//
// noteSockets puts both ends into the map when their connection is established.
func noteSockets(sockets *ebpf.Map) *ebpf.ProgramSpec {
	const activeEstablished, passiveEstablished = 4, 5 // BPF_SOCK_OPS_*_ESTABLISHED_CB
	return &ebpf.ProgramSpec{
		Name: "note", Type: ebpf.SockOps, AttachType: ebpf.AttachCGroupSockOps, License: "GPL",
		Instructions: asm.Instructions{
			asm.Mov.Reg(asm.R6, asm.R1),
			asm.LoadMem(asm.R2, asm.R6, opsFamily, asm.Word),
			asm.JNE.Imm(asm.R2, unix.AF_INET, "out"),
			asm.LoadMem(asm.R3, asm.R6, opsRemotePort, asm.Word),
			asm.HostTo(asm.BE, asm.R3, asm.Word),
			asm.LoadMem(asm.R4, asm.R6, opsLocalPort, asm.Word),
			asm.LoadMem(asm.R2, asm.R6, opsOp, asm.Word),
			asm.JEq.Imm(asm.R2, passiveEstablished, "server"),
			asm.JNE.Imm(asm.R2, activeEstablished, "out"),
			asm.JNE.Imm(asm.R3, joinedPort, "out"),
			asm.LSh.Imm(asm.R4, 1),
			asm.StoreMem(asm.RFP, -4, asm.R4, asm.Word),
			asm.Ja.Label("put"),
			asm.JNE.Imm(asm.R4, joinedPort, "out").WithSymbol("server"),
			asm.LSh.Imm(asm.R3, 1),
			asm.Add.Imm(asm.R3, 1),
			asm.StoreMem(asm.RFP, -4, asm.R3, asm.Word),
			asm.Mov.Reg(asm.R1, asm.R6).WithSymbol("put"),
			asm.LoadMapPtr(asm.R2, sockets.FD()),
			asm.Mov.Reg(asm.R3, asm.RFP),
			asm.Add.Imm(asm.R3, -4),
			asm.Mov.Imm(asm.R4, 0), // BPF_ANY: a port is used again
			asm.FnSockHashUpdate.Call(),
			asm.Mov.Imm(asm.R0, 1).WithSymbol("out"),
			asm.Return(),
		},
	}
}

// directMessages gives what a socket sends to the other end.
func directMessages(sockets *ebpf.Map) *ebpf.ProgramSpec {
	const ingress = 1 // BPF_F_INGRESS: into the receive queue of the socket found
	return &ebpf.ProgramSpec{
		Name: "direct", Type: ebpf.SkMsg, AttachType: ebpf.AttachSkMsgVerdict, License: "GPL",
		Instructions: asm.Instructions{
			asm.LoadMem(asm.R3, asm.R1, msgRemotePort, asm.Word),
			asm.HostTo(asm.BE, asm.R3, asm.Word),
			asm.LoadMem(asm.R4, asm.R1, msgLocalPort, asm.Word),
			asm.JEq.Imm(asm.R4, joinedPort, "server"),
			asm.LSh.Imm(asm.R4, 1),
			asm.Add.Imm(asm.R4, 1),
			asm.StoreMem(asm.RFP, -4, asm.R4, asm.Word),
			asm.Ja.Label("give"),
			asm.LSh.Imm(asm.R3, 1).WithSymbol("server"),
			asm.StoreMem(asm.RFP, -4, asm.R3, asm.Word),
			asm.LoadMapPtr(asm.R2, sockets.FD()).WithSymbol("give"),
			asm.Mov.Reg(asm.R3, asm.RFP),
			asm.Add.Imm(asm.R3, -4),
			asm.Mov.Imm(asm.R4, ingress),
			asm.FnMsgRedirectHash.Call(),
			asm.Mov.Imm(asm.R0, 1), // SK_PASS, also where the other end is not in the map
			asm.Return(),
		},
	}
}

// joinedWay is a way between two sockets of one machine, with TCP and IP or joined.
type joinedWay struct {
	load   load
	joined bool

	// One value for each round.
	opens, one, oneP, requests, stream []float64 // a second; p50 and p99 in microseconds; a second; Gbit/s
}

// joinedPath is where both sockets are.
type joinedPath struct {
	name          string
	plain, joined *joinedWay
	server        *host
	device        string // of the client's host, where packets are seen
}

// runSockmap measures local connections with and without a map of sockets, and what others see of them.
func (b *bench) runSockmap(ctx context.Context) (figures []figure, err error) {
	group, err := newControlGroup()
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, group.remove()) }()
	j, err := join(group.dir)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, j.close()) }()
	var hosts [3]*host
	for i := range hosts {
		if hosts[i], err = b.net.host(ctx, fmt.Sprintf("joined%d", b.net.count)); err != nil {
			return nil, err
		}
		defer func() { err = errors.Join(err, hosts[i].remove(context.WithoutCancel(ctx))) }()
	}
	single, client, server := hosts[0], hosts[1], hosts[2]
	local := netip.MustParseAddr("127.0.0.1")
	paths := []*joinedPath{
		joinedPathTo("loopback", single, single, local, "lo"),
		joinedPathTo("two Pods", client, server, server.addr, "eth0"),
	}
	for _, p := range paths {
		listeners, err := p.serve(group)
		if err != nil {
			return nil, err
		}
		defer func() {
			for _, l := range listeners {
				_ = l.Close()
			}
		}()
		got, err := b.joinedOn(ctx, group, p)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", p.name, err)
		}
		figures = append(figures, got...)
	}
	return figures, nil
}

func joinedPathTo(name string, from, to *host, at netip.Addr, device string) *joinedPath {
	way := func(port uint16, joined bool) *joinedWay {
		return &joinedWay{load: load{from, netip.AddrPortFrom(at, port)}, joined: joined}
	}
	return &joinedPath{name: name, plain: way(plainPort, false), joined: way(joinedPort, true), server: to, device: device}
}

// serve has both servers listen. The sockets of a server have the control group that it listened in.
func (p *joinedPath) serve(group *controlGroup) (out []io.Closer, err error) {
	l, err := serveLoad(p.server, plainPort)
	if err != nil {
		return nil, err
	}
	out = append(out, l)
	err = group.in(func() error {
		l, err := serveLoad(p.server, joinedPort)
		if err == nil {
			out = append(out, l)
		}
		return err
	})
	return out, err
}

// joinedOn measures both ways of a path in turns.
func (b *bench) joinedOn(ctx context.Context, group *controlGroup, p *joinedPath) ([]figure, error) {
	ways := []*joinedWay{p.plain, p.joined}
	in := func(w *joinedWay, f func() error) error {
		if !w.joined {
			return f()
		}
		return group.in(f)
	}
	d := time.Duration(b.few(700, 100)) * time.Millisecond
	for round := range b.few(9, 1) {
		for i := range ways {
			w := ways[(i+round)%len(ways)]
			if err := in(w, func() error { return w.round(ctx, d) }); err != nil {
				return nil, err
			}
		}
	}
	var seen [2]*sight
	for i, w := range ways {
		err := in(w, func() (err error) {
			seen[i], err = p.look(ctx, w)
			return err
		})
		if err != nil {
			return nil, err
		}
		b.say("%s, joined %v: %.0f connections/s, a request p50 %.1f µs, p99 %.1f µs, %.0f requests/s, %.1f Gbit/s; %+v", p.name, w.joined,
			median(w.opens), median(w.one), median(w.oneP), median(w.requests), median(w.stream), *seen[i])
	}
	return p.figures(seen[0], seen[1]), nil
}

func (w *joinedWay) round(ctx context.Context, d time.Duration) error {
	opened, err := w.load.opens(ctx, openClients, d)
	if err != nil {
		return err
	}
	w.opens = append(w.opens, opened.perSecond)
	one, err := w.load.requests(ctx, 1, d)
	if err != nil {
		return err
	}
	w.one = append(w.one, 1e3*percentile(one.latency, 0.5))
	w.oneP = append(w.oneP, 1e3*percentile(one.latency, 0.99))
	kept, err := w.load.requests(ctx, keptClients, d)
	if err != nil {
		return err
	}
	w.requests = append(w.requests, kept.perSecond)
	bits, err := w.load.readStream(ctx, streamConns, d)
	w.stream = append(w.stream, bits/1e9)
	return err
}

// sight is what others see of sightRequests requests on an open connection, and what a rule does to it.
type sight struct {
	captured int64 // bytes of TCP that a packet socket has, as tcpdump has one
	counted  int64 // bytes that a counter of nf_tables has, at the server
	tracked  int64 // bytes that connection tracking has of the connection
	passed   int   // requests of sightDenied that were answered while a rule of the server's host drops all of the connection's packets
}

const (
	sightRequests = 1000
	sightDenied   = 20
	// sightWait is how long a request may take that a rule may drop.
	sightWait = 100 * time.Millisecond
)

const sightRules = `table inet sight {
	chain in {
		type filter hook input priority 0
		tcp dport %d ct state new,established counter
	}
}
`

// look sends requests on one connection, and looks where an administrator would.
func (p *joinedPath) look(ctx context.Context, w *joinedWay) (s *sight, err error) {
	s = &sight{}
	if err := p.server.sysctl("net/netfilter/nf_conntrack_acct", "1"); err != nil {
		return nil, err
	}
	port := int(w.load.to.Port())
	if _, err := p.nft(ctx, fmt.Sprintf(sightRules, port)); err != nil {
		return nil, err
	}
	defer func() {
		_, e := p.nft(context.WithoutCancel(ctx), "delete table inet sight\n")
		err = errors.Join(err, e)
	}()
	var packets int
	err = w.load.from.on(func() (err error) { packets, err = packetsOf(p.device); return err })
	if err != nil {
		return nil, err
	}
	defer unix.Close(packets)
	err = w.load.from.on(func() error { return p.requestsSeen(ctx, w, packets, s) })
	return s, err
}

// requestsSeen is look on a thread of the client's host.
func (p *joinedPath) requestsSeen(ctx context.Context, w *joinedWay, packets int, s *sight) error {
	fd, err := w.load.dial(wantEcho)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	b := make([]byte, messageSize)
	for range sightRequests {
		if err := echoOn(fd, b); err != nil {
			return err
		}
		got, err := captured(packets, w.load.to.Port()) // each time, since what the socket keeps is bounded
		if err != nil {
			return err
		}
		s.captured += got
	}
	rules, err := p.nft(ctx, "list table inet sight\n")
	if err != nil {
		return err
	}
	if s.counted, err = numberAfter(rules, " bytes "); err != nil {
		return err
	}
	if err := p.server.on(func() (err error) { s.tracked, err = trackedBytes(w.load.to.Port()); return err }); err != nil {
		return err
	}
	if _, err := p.nft(ctx, fmt.Sprintf("insert rule inet sight in tcp dport %d drop\n", w.load.to.Port())); err != nil {
		return err
	}
	tv := unix.NsecToTimeval(sightWait.Nanoseconds())
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &tv); err != nil {
		return err
	}
	for range sightDenied {
		switch err := echoOn(fd, b); {
		case err == nil:
			s.passed++
		case errors.Is(err, unix.EAGAIN):
			return nil // what was not answered comes with the next answer, if there is one
		default:
			return err
		}
	}
	return nil
}

// nft runs a script of nft(8) on the server's host.
func (p *joinedPath) nft(ctx context.Context, script string) (string, error) {
	var out []byte
	err := p.server.on(func() (err error) {
		ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
		defer cancel()
		cmd := exec.CommandContext(ctx, "nft", "-f", "-")
		cmd.Stdin = strings.NewReader(script)
		out, err = cmd.CombinedOutput()
		return err
	})
	if err != nil {
		return "", fmt.Errorf("nft: %w: %s", err, out)
	}
	return string(out), nil
}

// numberAfter returns the number behind the first key in a text.
func numberAfter(text, key string) (int64, error) {
	_, rest, found := strings.Cut(text, key)
	if !found {
		return 0, fmt.Errorf("no %q in %q", key, text)
	}
	end := strings.IndexFunc(rest, func(r rune) bool { return r < '0' || r > '9' })
	if end < 0 {
		end = len(rest)
	}
	return strconv.ParseInt(rest[:end], 10, 64)
}

// trackedBytes is what connection tracking of the calling thread's namespace has counted of the established connection to a port,
// in the direction of the server.
func trackedBytes(port uint16) (int64, error) {
	text, err := os.ReadFile("/proc/thread-self/net/nf_conntrack")
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(text)) {
		if strings.Contains(line, "ESTABLISHED") && strings.Contains(line, fmt.Sprintf(" dport=%d ", port)) {
			return numberAfter(line, " bytes=")
		}
	}
	return 0, fmt.Errorf("connection tracking has no connection to port %d", port)
}

// packetsOf opens a packet socket on a device of the calling thread's namespace, as tcpdump does.
func packetsOf(device string) (fd int, err error) {
	index, err := deviceIndex(device)
	if err != nil {
		return -1, err
	}
	const all = unix.ETH_P_ALL << 8 // in the order of the network; a socket for one protocol sees nothing that is sent
	if fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, all); err != nil {
		return -1, err
	}
	if err = unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: all, Ifindex: index}); err != nil {
		return -1, errors.Join(err, unix.Close(fd))
	}
	return fd, nil
}

func deviceIndex(name string) (int, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, err
	}
	defer unix.Close(fd)
	req, err := unix.NewIfreq(name)
	if err != nil {
		return 0, err
	}
	if err := unix.IoctlIfreq(fd, unix.SIOCGIFINDEX, req); err != nil {
		return 0, fmt.Errorf("%s: %w", name, err)
	}
	return int(req.Uint32()), nil
}

// captured returns how many bytes of TCP a packet socket has got that were sent to a port.
func captured(fd int, port uint16) (total int64, err error) {
	b := make([]byte, 1<<16)
	for range 1 << 16 {
		n, from, err := unix.Recvfrom(fd, b, 0)
		if errors.Is(err, unix.EAGAIN) {
			return total, nil
		}
		if err != nil {
			return total, err
		}
		if ll, ok := from.(*unix.SockaddrLinklayer); ok && ll.Pkttype == unix.PACKET_OUTGOING {
			total += tcpBytes(b[:n], port)
		}
	}
	return total, errors.New("a packet socket has no end")
}

// tcpBytes is the length of what a packet of IPv4 carries for a port of TCP.
func tcpBytes(packet []byte, port uint16) int64 {
	if len(packet) < 20 || packet[9] != unix.IPPROTO_TCP {
		return 0
	}
	header := int(packet[0]&15) * 4
	total := int(packet[2])<<8 | int(packet[3])
	if len(packet) < header+20 {
		return 0
	}
	tcp := packet[header:]
	if uint16(tcp[2])<<8|uint16(tcp[3]) != port {
		return 0
	}
	return int64(total - header - int(tcp[12]>>4)*4)
}

// readStream is stream with bytes that are copied: a socket that is joined knows no MSG_TRUNC.
func (l load) readStream(ctx context.Context, n int, d time.Duration) (float64, error) {
	return l.streamBy(ctx, n, d, func(fd int, b []byte) (n int, err error) {
		err = retryEINTR(func() error { n, err = unix.Read(fd, b); return err })
		if err == nil && n == 0 {
			err = io.ErrUnexpectedEOF
		}
		return n, err
	})
}

// figures compare joined sockets with others. What others see is of requests that sum up to sightRequests messages.
func (p *joinedPath) figures(plain, joined *sight) []figure {
	var out []figure
	add := func(what string, u unit, mine, other float64) {
		f := unpaired(what+", "+p.name, u, mine, expectation{})
		f.peer, f.peerName = other, "not joined"
		out = append(out, f)
	}
	add("new connections", perSecond, median(p.joined.opens), median(p.plain.opens))
	add("a request on one connection, p50", microseconds, median(p.joined.one), median(p.plain.one))
	add("a request on one connection, p99", microseconds, median(p.joined.oneP), median(p.plain.oneP))
	add(fmt.Sprintf("requests on %d connections", keptClients), perSecond, median(p.joined.requests), median(p.plain.requests))
	add(fmt.Sprintf("throughput of %d connections", streamConns), gigabits, median(p.joined.stream), median(p.plain.stream))
	sent := fmt.Sprintf(" of %d sent", sightRequests*messageSize+1)
	add("bytes"+sent+" that a packet socket sees", pieces, float64(joined.captured), float64(plain.captured))
	add("bytes of packets that a counter has", pieces, float64(joined.counted), float64(plain.counted))
	add("bytes of packets that connection tracking has", pieces, float64(joined.tracked), float64(plain.tracked))
	add(fmt.Sprintf("requests of %d answered through a rule that drops", sightDenied), pieces, float64(joined.passed), float64(plain.passed))
	return out
}
