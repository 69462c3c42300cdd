// Command resolve looks names up with Go's resolver: pure Go or, built with cgo
// and -tags netcgo, that of the C library.
//
//	resolve NAME...       prints the addresses, sorted, one name a line
//	resolve -watch NAME   looks it up every 10 ms until SIGTERM, and prints a
//	                      line for each look-up that fails:
//	                      failed BEGIN_MS END_MS ERROR   (Unix time)
package main

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/signal"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"
)

func main() {
	if len(os.Args) == 3 && os.Args[1] == "-watch" {
		watch(os.Args[2])
		return
	}
	for _, name := range os.Args[1:] {
		ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
		addrs, err := net.DefaultResolver.LookupHost(ctx, name)
		cancel()
		if err != nil {
			fmt.Println(name, "error", err)
			continue
		}
		slices.Sort(addrs)
		fmt.Println(name, strings.Join(addrs, " "))
	}
}

func watch(name string) {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	tick := time.NewTicker(10 * time.Millisecond)
	var wg sync.WaitGroup
	defer wg.Wait()
	for n := 0; ; n++ {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		if n%100 == 0 {
			fmt.Println("asked", n, time.Now().UnixMilli())
		}
		wg.Go(func() {
			begin := time.Now()
			if _, err := net.DefaultResolver.LookupHost(context.Background(), name); err != nil {
				fmt.Println("failed", begin.UnixMilli(), time.Now().UnixMilli(), err)
			}
		})
	}
}
