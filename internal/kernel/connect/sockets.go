package connect

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/kernel/netns"
)

// stale are sockets to end in one network namespace, by their cookie, with what was noted of each.
type stale map[uint64]programConnected

// EndSockets ends every connected socket of UDP that was translated and may not stay: its program gets ECONNABORTED. stay is
// asked by the frontend that the socket was connected with and the endpoint that it was led to. It returns how many were ended.
// Notes of sockets that are gone go, too. The next call tries again what has failed, and sockets of namespaces that
// were not found, unless the map is half full.
func (p *Programs) EndSockets(stay func(front, endpoint netip.AddrPort) bool) (ended int, err error) {
	return endSockets(p.maps.Sockets, p.homePath(), stay)
}

// homePath is the path of the node's network namespace.
func (p *Programs) homePath() string { return fmt.Sprintf("/proc/self/fd/%d", p.home.Fd()) }

// endSockets is EndSockets for a map of sockets. home is the path of the node's network namespace.
func endSockets(sockets *ebpf.Map, home string, stay func(front, endpoint netip.AddrPort) bool) (ended int, err error) {
	found, noted, err := unwanted(sockets, stay)
	errs := []error{problem("read connected sockets", err)}
	if len(found) == 0 {
		return 0, errs[0]
	}
	handled, err := allNamespaces(home).each(found, func(cookie uint64) error {
		n, err := found[cookie].end()
		ended += n
		return err
	})
	errs = append(errs, err)
	for cookie, all := range found {
		// A namespace without a process may be found later. Where there is little room, notes that nothing else removes must go.
		if handled[cookie] || err == nil && noted > sockets.MaxEntries()/2 {
			errs = append(errs, all.forget(sockets))
		}
	}
	return ended, errors.Join(errs...)
}

// unwanted returns the sockets of a map that may not stay, by their namespace, and how many the map has.
func unwanted(sockets *ebpf.Map, stay func(front, endpoint netip.AddrPort) bool) (found map[uint64]stale, noted uint32, err error) {
	found = map[uint64]stale{}
	err = each(sockets, func(k *uint64, v *programConnected) {
		noted++
		if stay(v.frontAddr(), v.To.addrPort()) {
			return
		}
		if found[v.Cookie] == nil {
			found[v.Cookie] = stale{}
		}
		found[v.Cookie][*k] = *v
	})
	return found, noted, err
}

// frontAddr is where the socket's program connects to.
func (c *programConnected) frontAddr() netip.AddrPort {
	return netip.AddrPortFrom(addrOf(c.Front.Addr), swapped(c.Front.Port))
}

// forget takes the sockets from the map. One that was connected again meanwhile has a new entry, which stays.
func (s stale) forget(sockets *ebpf.Map) error {
	var errs []error
	for cookie, was := range s {
		var is programConnected
		err := sockets.Lookup(cookie, &is)
		if err == nil && is == was {
			err = sockets.Delete(cookie)
		}
		errs = append(errs, problem("forget a connected socket", gone(err)))
	}
	return errors.Join(errs...)
}

// namedNamespaces is where iproute2 and container runtimes keep network namespaces, also those without a process.
const namedNamespaces = "/run/netns"

func named() (out []string) {
	files, _ := filepath.Glob(filepath.Join(namedNamespaces, "*"))
	for _, file := range files {
		var st unix.Statfs_t
		if unix.Statfs(file, &st) == nil && st.Type == unix.NSFS_MAGIC {
			out = append(out, file)
		}
	}
	return out
}

// namespaces finds network namespaces by the processes that are in them, and by their names.
type namespaces struct {
	// barred is set when one of them could not be entered.
	barred bool
	paths  func() ([]string, error)
	inode  func(path string) (uint64, error)
	do     func(path string, f func() error) error
}

// allNamespaces are home, the namespaces of all processes, and the named ones in /run/netns.
func allNamespaces(home string) *namespaces {
	paths := func() ([]string, error) {
		proc, err := os.Open("/proc")
		if err != nil {
			return nil, err
		}
		defer func() { _ = proc.Close() }()
		names, err := proc.Readdirnames(-1)
		out := append([]string{home}, named()...)
		for _, name := range names {
			if pid, err := strconv.Atoi(name); err == nil {
				out = append(out, netns.Of(pid))
			}
		}
		return out, err
	}
	return &namespaces{paths: paths, inode: netns.Inode, do: netns.Do}
}

// each calls f in every network namespace that is wanted by its cookie, if a process has it or it has a name, and returns the ones where
// that gave no error. Without an error it has met every such namespace that this process may enter.
func (n *namespaces) each(wanted map[uint64]stale, f func(cookie uint64) error) (handled map[uint64]bool, err error) {
	handled = map[uint64]bool{}
	seen := map[uint64]bool{}
	var errs []error
	// A process that ends while its namespace is opened may have left another one in it, which is younger than the list.
	for range 3 {
		paths, err := n.paths()
		if err != nil {
			return handled, errors.Join(append(errs, fmt.Errorf("cannot list processes: %w", err))...)
		}
		ended := false
		for _, path := range paths {
			if len(handled) == len(wanted) {
				break
			}
			id, err := n.inode(path)
			if err != nil || seen[id] { // the process has ended
				continue
			}
			entered := false
			err = n.do(path, func() error {
				entered = true
				cookie, err := Cookie()
				if err != nil || wanted[cookie] == nil {
					return err
				}
				err = f(cookie)
				handled[cookie] = err == nil
				return err
			})
			if !entered && (errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.EACCES)) { // it has ended just now
				ended = true
				continue
			}
			seen[id] = true
			if !entered && errors.Is(err, unix.EPERM) { // of a namespace that we may not enter nothing is known
				n.barred = true
				continue
			}
			errs = append(errs, err)
		}
		if !ended {
			return handled, errors.Join(errs...)
		}
	}
	return handled, errors.Join(append(errs, errors.New("cannot enter a network namespace: its processes end too soon"))...)
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
			if was, ok := s[cookie]; !ok || netip.AddrPortFrom(to.Unmap(), one.ID.DestinationPort) != was.To.addrPort() {
				continue
			}
			switch err := destroy(family, unix.IPPROTO_UDP, &one.ID); {
			case err == nil:
				ended++
			case !errors.Is(err, unix.ENOENT): // it was closed just now
				return ended, fmt.Errorf("cannot end a socket that is connected with %s: %w", one.ID.Destination, err)
			}
		}
	}
	return ended, nil
}

// destroy ends a socket.
func destroy(family, protocol uint8, id *netlink.SocketID) error {
	req := nl.NewNetlinkRequest(nl.SOCK_DESTROY, unix.NLM_F_ACK)
	req.AddRawData(diagRequest(family, protocol, ^uint32(0), id))
	_, err := req.Execute(unix.NETLINK_INET_DIAG, 0)
	return err
}

// diagRequest is a struct inet_diag_req_v2: sock_diag(7). states has a bit for each state that counts.
func diagRequest(family, protocol uint8, states uint32, id *netlink.SocketID) []byte {
	b := make([]byte, 0, 56)
	b = append(b, family, protocol, 0, 0)
	b = native.AppendUint32(b, states)
	b = binary.BigEndian.AppendUint16(b, id.SourcePort)
	b = binary.BigEndian.AppendUint16(b, id.DestinationPort)
	for _, ip := range [][]byte{id.Source, id.Destination} {
		var a [16]byte
		if family == unix.AF_INET && len(ip) > 4 {
			ip = ip[len(ip)-4:]
		}
		copy(a[:], ip)
		b = append(b, a[:]...)
	}
	b = native.AppendUint32(b, id.Interface)
	b = native.AppendUint32(b, id.Cookie[0])
	return native.AppendUint32(b, id.Cookie[1])
}

// canEnd returns why sockets of UDP cannot be ended here, or nil: CONFIG_INET_DIAG_DESTROY, CONFIG_INET_UDP_DIAG
// or the right may be missing. It ends a socket that it has made: of one that is not there the kernel says so before it asks for the right.
func canEnd() error {
	if _, err := netlink.SocketDiagUDP(unix.AF_INET); err != nil && !errors.Is(err, netlink.ErrDumpInterrupted) {
		return fmt.Errorf("cannot list sockets of UDP (CONFIG_INET_UDP_DIAG): %w", err)
	}
	fd, own, err := anySocket()
	if err != nil {
		return fmt.Errorf("cannot make a socket of UDP to end: %w", err)
	}
	defer func() { _ = unix.Close(fd) }()
	switch err := destroy(unix.AF_INET, unix.IPPROTO_UDP, own); {
	case err == nil:
		return nil
	case errors.Is(err, unix.EPERM):
		return fmt.Errorf("cannot end sockets of UDP (CAP_NET_ADMIN): %w", err)
	default:
		return fmt.Errorf("cannot end sockets of UDP (CONFIG_INET_DIAG_DESTROY): %w", err)
	}
}

// anySocket makes a socket of UDP on a free port, which nobody reads.
func anySocket() (fd int, id *netlink.SocketID, err error) {
	if fd, err = unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0); err != nil {
		return -1, nil, err
	}
	if err = unix.Bind(fd, &unix.SockaddrInet4{}); err != nil {
		return -1, nil, errors.Join(err, unix.Close(fd))
	}
	at, err := unix.Getsockname(fd)
	if err != nil {
		return -1, nil, errors.Join(err, unix.Close(fd))
	}
	cookie, err := unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_COOKIE)
	if err != nil {
		return -1, nil, errors.Join(err, unix.Close(fd))
	}
	return fd, &netlink.SocketID{
		SourcePort: uint16(at.(*unix.SockaddrInet4).Port), Source: make([]byte, 4), Destination: make([]byte, 4),
		Cookie: [2]uint32{uint32(cookie), uint32(cookie >> 32)},
	}, nil
}
