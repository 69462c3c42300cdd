package iptables

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/kernel/iptables"
	"github.com/fairlead/fairlead/internal/kernel/recent"
	"github.com/fairlead/fairlead/internal/svc"
)

// Clients calls f for each client that the rules of the calling thread's network namespace keep at an endpoint of a port, until f
// returns an error. A client that several frontends of the port keep is at the endpoint where it came last. The client that came last
// is the last one of its port.
func Clients(ctx context.Context, f func(dataplane.Kept) error) error {
	type portKey struct {
		id       svc.PortName
		protocol svc.Protocol
	}
	ports := map[portKey]map[netip.Addr]dataplane.Visit{}
	err := eachSticky(ctx, func(lists *recent.Lists, s *stickyFront) error {
		kept, err := s.kept(ctx, lists)
		of := portKey{s.port, s.protocol}
		if ports[of] == nil {
			ports[of] = map[netip.Addr]dataplane.Visit{}
		}
		for client, v := range kept {
			if before, have := ports[of][client]; !have || v.Seen > before.Seen {
				ports[of][client] = v
			}
		}
		return err
	})
	for of, kept := range ports { // also if some rules could not be read
		for _, client := range byTime(kept) {
			failed := f(dataplane.Kept{Port: of.id, Protocol: of.protocol, Client: client, Endpoint: kept[client].At})
			if failed = errors.Join(ctx.Err(), failed); failed != nil {
				return errors.Join(err, failed)
			}
		}
	}
	return err
}

// Keep has these rules keep clients at endpoints, for as long as if they had connected now. A client that is kept already stays where
// it is. A list that is full gets no more; the ones that came last have precedence.
func Keep(ctx context.Context, clients dataplane.ClientsOf) error {
	return eachSticky(ctx, func(lists *recent.Lists, s *stickyFront) error {
		kept, err1 := s.kept(ctx, lists)
		next, err2 := clients.Latest(ctx, s.port, s.protocol, maps.Keys(s.lists))
		if err := errors.Join(err1, err2); err != nil {
			return err
		}
		room := map[netip.AddrPort]int{}
		for at := range s.lists {
			room[at] = recent.Limit()
		}
		for _, v := range kept {
			room[v.At]--
		}
		var take []netip.Addr
		for _, client := range slices.Backward(byTime(next)) {
			if _, have := kept[client]; !have && room[next[client].At] > 0 {
				room[next[client].At]--
				take = append(take, client)
			}
		}
		for _, client := range slices.Backward(take) { // the list then forgets them in this order
			if err := lists.Add(s.lists[next[client].At], client); err != nil {
				return err
			}
		}
		return nil
	})
}

// stickyFront is a frontend with session affinity, as its rules say.
type stickyFront struct {
	port     svc.PortName
	protocol svc.Protocol
	lists    map[netip.AddrPort]string // by endpoint
}

// kept returns the clients of the frontend, and where each came last.
func (s *stickyFront) kept(ctx context.Context, lists *recent.Lists) (map[netip.Addr]dataplane.Visit, error) {
	of := dataplane.ClientsOf(func(_ svc.PortName, _ svc.Protocol, at netip.AddrPort) (map[netip.Addr]uint64, error) {
		return lists.Addrs(s.lists[at])
	})
	return of.Latest(ctx, s.port, s.protocol, maps.Keys(s.lists))
}

// byTime returns clients in the order in which they came.
func byTime(all map[netip.Addr]dataplane.Visit) []netip.Addr {
	return slices.SortedFunc(maps.Keys(all), func(a, b netip.Addr) int {
		return cmp.Or(cmp.Compare(all[a].Seen, all[b].Seen), a.Compare(b))
	})
}

// eachSticky calls f for each frontend with affinity. Where this mode has no list it runs no program.
func eachSticky(ctx context.Context, f func(*recent.Lists, *stickyFront) error) error {
	lists, err := recent.Open()
	if err != nil {
		return err
	}
	defer lists.Close()
	names, err := lists.Names()
	if err != nil || !slices.ContainsFunc(names, func(n string) bool { return strings.HasPrefix(n, listPrefix) }) {
		return err
	}
	return iptables.Each(func(t *iptables.Tool) error {
		fronts := map[string]*stickyFront{}
		port := map[string]svc.PortName{} // by chain
		// Tables that iptables cannot show, such as native ones of nft, have no rules of this mode.
		err := t.Tables(ctx, func(string) {}, func(chain, line string) {
			if !ours(chain) {
				return
			}
			words := strings.Fields(line)
			if id, err := svc.ParsePortName(strings.Trim(after(words, "--comment"), `"`)); err == nil {
				port[chain] = id
			}
			list, r := after(words, "--name"), parseRule(line)
			id, known := port[chain]
			if !known || !strings.HasPrefix(list, listPrefix) || !r.endpoint.IsValid() {
				return
			}
			// Chains of clients in the cluster and outside have the same lists.
			front := strings.TrimSuffix(list, endpointOf(r.endpoint))
			if fronts[front] == nil {
				fronts[front] = &stickyFront{port: id, protocol: protocolOf(r.proto), lists: map[netip.AddrPort]string{}}
			}
			fronts[front].lists[r.endpoint] = list
		})
		for _, name := range slices.Sorted(maps.Keys(fronts)) {
			if err != nil {
				break
			}
			if err = f(lists, fronts[name]); err != nil {
				err = fmt.Errorf("lists %s*: %w", name, err)
			}
		}
		return err
	})
}

// after returns the word after a word, empty if there is none.
func after(words []string, word string) string {
	if i := slices.Index(words, word); i >= 0 && i+1 < len(words) {
		return words[i+1]
	}
	return ""
}

func protocolOf(name string) svc.Protocol {
	for _, p := range protocols {
		if protoName(p) == name {
			return p
		}
	}
	return 0
}
