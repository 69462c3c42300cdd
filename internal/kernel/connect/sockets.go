package connect

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/kernel/netns"
)

// stale are sockets to end in one network namespace, by their cookie, with the endpoint that each is connected with.
type stale map[uint64]netip.AddrPort

// EndSockets ends every connected socket of UDP that was translated and may not stay: its program gets ECONNABORTED. stay is
// asked by the frontend that the socket was connected with and the endpoint that it was led to. It returns how many were ended.
// What is known of sockets that are gone goes, too.
func (p *Programs) EndSockets(stay func(front, endpoint netip.AddrPort) bool) (ended int, err error) {
	found := map[uint64]stale{}
	var k uint64
	var v programConnected
	it := p.maps.Sockets.Iterate()
	for it.Next(&k, &v) {
		at := v.To.addrPort()
		if stay(netip.AddrPortFrom(addrOf(v.Front.Addr), swapped(v.Front.Port)), at) {
			continue
		}
		if found[v.Cookie] == nil {
			found[v.Cookie] = stale{}
		}
		found[v.Cookie][k] = at
	}
	errs := []error{problem("read connected sockets", it.Err())} // it gives up where very many come and go
	if len(found) == 0 {
		return 0, errs[0]
	}
	errs = append(errs, p.eachNamespace(found, func(cookie uint64) error {
		n, err := found[cookie].end()
		if ended += n; err != nil {
			delete(found, cookie) // for the next time
		}
		return err
	}))
	for _, all := range found {
		for cookie := range all {
			errs = append(errs, problem("forget a connected socket", gone(p.maps.Sockets.Delete(cookie))))
		}
	}
	return ended, errors.Join(errs...)
}

// eachNamespace calls f in every network namespace that is wanted by its cookie, if a process has it.
func (p *Programs) eachNamespace(wanted map[uint64]stale, f func(cookie uint64) error) error {
	home := fmt.Sprintf("/proc/self/fd/%d", p.home.Fd())
	paths, err := filepath.Glob("/proc/[0-9]*/ns/net")
	if err != nil {
		return err
	}
	seen, left := map[uint64]bool{}, len(wanted)
	var errs []error
	for _, path := range append([]string{home}, paths...) {
		if left == 0 {
			break
		}
		id, err := netns.Inode(path)
		if err != nil || seen[id] { // the process has ended
			continue
		}
		seen[id] = true
		err = netns.Do(path, func() error {
			cookie, err := Cookie()
			if err != nil || wanted[cookie] == nil {
				return err
			}
			left--
			return f(cookie)
		})
		if !errors.Is(err, os.ErrNotExist) && !errors.Is(err, unix.EPERM) { // of a namespace that we may not enter nothing is known
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// end ends the sockets, in the network namespace of the calling thread.
func (s stale) end() (ended int, err error) {
	for _, family := range []uint8{unix.AF_INET, unix.AF_INET6} {
		all, err := netlink.SocketDiagUDP(family)
		if err != nil && !errors.Is(err, netlink.ErrDumpInterrupted) {
			return ended, fmt.Errorf("cannot list sockets: %w", err)
		}
		for _, one := range all {
			cookie := uint64(one.ID.Cookie[0]) | uint64(one.ID.Cookie[1])<<32
			to, _ := netip.AddrFromSlice(one.ID.Destination)
			if at, ok := s[cookie]; !ok || netip.AddrPortFrom(to.Unmap(), one.ID.DestinationPort) != at {
				continue
			}
			switch err := destroy(family, &one.ID); {
			case err == nil:
				ended++
			case !errors.Is(err, unix.ENOENT): // it was closed just now
				return ended, fmt.Errorf("cannot end a socket that is connected with %s: %w", one.ID.Destination, err)
			}
		}
	}
	return ended, nil
}

// destroy ends a socket of UDP: sock_diag(7), inet_diag_req_v2.
func destroy(family uint8, id *netlink.SocketID) error {
	req := nl.NewNetlinkRequest(nl.SOCK_DESTROY, unix.NLM_F_ACK)
	b := make([]byte, 0, 56)
	b = append(b, family, unix.IPPROTO_UDP, 0, 0)
	b = native.AppendUint32(b, ^uint32(0)) // in any state
	b = binary.BigEndian.AppendUint16(b, id.SourcePort)
	b = binary.BigEndian.AppendUint16(b, id.DestinationPort)
	for _, ip := range [][]byte{id.Source, id.Destination} {
		var a [16]byte
		if family == unix.AF_INET {
			ip = ip[len(ip)-4:]
		}
		copy(a[:], ip)
		b = append(b, a[:]...)
	}
	b = native.AppendUint32(b, id.Interface)
	b = native.AppendUint32(b, id.Cookie[0])
	b = native.AppendUint32(b, id.Cookie[1])
	req.AddRawData(b)
	_, err := req.Execute(unix.NETLINK_INET_DIAG, 0)
	return err
}

// canEnd returns why sockets of UDP cannot be ended here, or nil: CONFIG_INET_DIAG_DESTROY and CONFIG_INET_UDP_DIAG may be missing.
// It asks for the end of a socket that is not there.
func canEnd() error {
	if _, err := netlink.SocketDiagUDP(unix.AF_INET); err != nil && !errors.Is(err, netlink.ErrDumpInterrupted) {
		return fmt.Errorf("cannot list sockets of UDP (CONFIG_INET_UDP_DIAG): %w", err)
	}
	none := netlink.SocketID{Source: make([]byte, 4), Destination: make([]byte, 4), Cookie: [2]uint32{1, 1}}
	if err := destroy(unix.AF_INET, &none); !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("cannot end sockets of UDP (CONFIG_INET_DIAG_DESTROY): %w", err)
	}
	return nil
}
