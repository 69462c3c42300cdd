package systemd

import (
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"
	"sync"

	"github.com/fairlead/fairlead/internal/kernel/socket"
)

// FileStore keeps sockets of this process in systemd while the unit restarts, also after a crash
// (https://systemd.io/FILE_DESCRIPTOR_STORE/). It is safe for concurrent use.
type FileStore struct {
	mu        sync.Mutex
	conn      *net.UnixConn
	at        *net.UnixAddr // systemd's socket
	listeners []net.Listener
	names     map[net.Listener]string
}

// firstListenFile is SD_LISTEN_FDS_START.
const firstListenFile = 3

// OpenFileStore takes over the listeners that an earlier process of the unit has left, and takes what systemd passes
// out of the environment. It returns nil where systemd keeps nothing: the unit needs FileDescriptorStoreMax=.
func OpenFileStore() (*FileStore, error) {
	at, most := OpenUnit().socket, os.Getenv("FDSTORE")
	pid, n := os.Getenv("LISTEN_PID"), os.Getenv("LISTEN_FDS")
	names := strings.Split(os.Getenv("LISTEN_FDNAMES"), ":")
	for _, name := range []string{"LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"} {
		_ = os.Unsetenv(name)
	}
	s := &FileStore{names: map[net.Listener]string{}}
	var errs []error
	if files, err := strconv.Atoi(n); err == nil && pid == strconv.Itoa(os.Getpid()) {
		for fd := firstListenFile; fd < firstListenFile+files; fd++ {
			f := os.NewFile(uintptr(fd), "inherited")
			l, err := net.FileListener(f)
			if errs = append(errs, err, f.Close()); err == nil {
				s.listeners = append(s.listeners, l)
				if i := fd - firstListenFile; i < len(names) {
					s.names[l] = names[i]
				}
			}
		}
	}
	// FDSTORE is set since systemd 254. Before, systemd drops descriptors for a unit without a store.
	if at == "" || most == "0" {
		return nil, errors.Join(errs...)
	}
	// Package net passes no files by a connected socket of datagrams.
	conn, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Net: "unixgram"})
	if err != nil {
		return nil, errors.Join(append(errs, fmt.Errorf("socket to notify systemd by: %w", err))...)
	}
	s.conn, s.at = conn, &net.UnixAddr{Name: at, Net: "unixgram"}
	return s, errors.Join(errs...)
}

// Inherited returns the listeners of the earlier process. They belong to the caller.
func (s *FileStore) Inherited() []net.Listener {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := s.listeners
	s.listeners = nil
	return out
}

// NameOf returns the name under which the earlier process had a listener of Inherited kept, empty if systemd did not tell.
func (s *FileStore) NameOf(l net.Listener) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.names[l]
}

// Keep gives systemd a copy of a listener, under a name without colons, until Drop or until the unit is stopped.
func (s *FileStore) Keep(name string, l *net.TCPListener) error {
	return socket.PackConn(l, func(rights []byte) error {
		_, _, err := s.conn.WriteMsgUnix([]byte("FDSTORE=1\nFDPOLL=0\nFDNAME="+name), rights, s.at)
		return err
	})
}

// Drop makes systemd close its copy.
func (s *FileStore) Drop(name string) error {
	_, err := s.conn.WriteToUnix([]byte("FDSTOREREMOVE=1\nFDNAME="+name), s.at)
	return err
}
