// Command apiserver runs only the API server with its etcd, without controllers, for tests that need an API and
// not the server's code: a program that is linked once costs less than each test binary that links it.
package main

import (
	"context"
	"flag"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"os/signal"
	"syscall"

	"k8s.io/klog/v2"

	"github.com/fairlead/fairlead/internal/apiserver"
)

func main() {
	dir := flag.String("data-dir", "", "directory of the server; its admin.kubeconfig is there once the server is ready")
	port := flag.Uint("secure-port", 0, "port on loopback")
	flag.Parse()
	klog.SetSlogLogger(slog.New(slog.DiscardHandler))
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	s, err := apiserver.New(apiserver.Options{
		DataDir:       *dir,
		SecurePort:    uint16(*port),
		BindAddresses: []netip.Addr{netip.MustParseAddr("127.0.0.1")},
		UnsafeNoFsync: true,
		Log:           slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelError})),
	})
	if err == nil {
		err = s.Run(ctx)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "apiserver:", err)
		os.Exit(1)
	}
}
