package lb

import (
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	v1 "github.com/fairlead/fairlead/internal/lb/v1"
	"github.com/fairlead/fairlead/internal/svc"
)

// The label of pools that are given on the command line.
const (
	managedByLabel = "fairlead.dev/managed-by"
	managedByFlags = "flags"
)

// The status of pools is written this long after a change, so that many changes are one
// write; what others have claimed is looked at again in the longer period.
const (
	tidyDelay     = 200 * time.Millisecond
	foreignPeriod = 30 * time.Second
)

// keepPools keeps the pools of the flags, and the status of all pools.
func (c *controller) keepPools(ctx context.Context) {
	recheck := time.NewTicker(foreignPeriod)
	defer recheck.Stop()
	for {
		err := c.keepFlagPools(ctx)
		if e := c.writePoolStatus(ctx); err == nil {
			err = e
		}
		again := (<-chan time.Time)(nil)
		if err != nil && ctx.Err() == nil {
			c.log.Warn("cannot write an IPAddressPool; retrying", "err", err, "every", maxInstallRetry)
			again = time.After(maxInstallRetry)
		}
		select {
		case <-ctx.Done():
			return
		case <-again:
		case <-c.tidy:
			select {
			case <-ctx.Done():
				return
			case <-time.After(tidyDelay):
			}
		case <-recheck.C:
			c.recheckForeign(ctx)
		}
	}
}

// keepFlagPools makes an object of each pool of the flags, puts back what was changed,
// and removes those that have no flag any more when none of their addresses is used.
func (c *controller) keepFlagPools(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, stepTimeout)
	defer cancel()
	c.mu.Lock()
	have := make(map[string]*v1.IPAddressPool, len(c.pools))
	used := map[string]bool{}
	for name, p := range c.pools {
		have[name] = p
		used[name] = c.alloc.Usage(name, svc.IPv4).Used+c.alloc.Usage(name, svc.IPv6).Used > 0
	}
	c.mu.Unlock()
	for _, f := range c.o.Pools {
		if err := c.keepFlagPool(ctx, f, have[f.Name]); err != nil {
			return err
		}
		delete(have, f.Name)
	}
	for name, p := range have {
		if p.Labels[managedByLabel] != managedByFlags {
			continue
		}
		var err error
		if !used[name] {
			err = c.lb.Pools.Delete(ctx, name, metav1.DeleteOptions{
				Preconditions: &metav1.Preconditions{UID: &p.UID, ResourceVersion: &p.ResourceVersion}})
		} else if p.Spec.IsAutoAssign() { // no other Service gets an address of it
			change := p.DeepCopy()
			change.Spec.AutoAssign = new(false)
			_, err = c.lb.Pools.Update(ctx, change, metav1.UpdateOptions{})
		}
		if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
			return err
		}
	}
	return nil
}

func (c *controller) keepFlagPool(ctx context.Context, f FlagPool, have *v1.IPAddressPool) error {
	want := v1.IPAddressPoolSpec{AutoAssign: new(true)}
	for _, r := range f.Ranges {
		want.Addresses = append(want.Addresses, r.First.String()+"-"+r.Last.String())
	}
	if have == nil {
		_, err := c.lb.Pools.Create(ctx, &v1.IPAddressPool{
			ObjectMeta: metav1.ObjectMeta{Name: f.Name, Labels: map[string]string{managedByLabel: managedByFlags}}, Spec: want,
		}, metav1.CreateOptions{})
		if apierrors.IsAlreadyExists(err) {
			return nil // it will be seen
		}
		return err
	}
	if have.Labels[managedByLabel] != managedByFlags {
		c.mu.Lock()
		c.recordPool(have, "NameTaken", "--lb-pool names a pool that was not made by it: the object is used as it is, and the flag is not")
		c.mu.Unlock()
		return nil
	}
	if reflect.DeepEqual(have.Spec, want) {
		return nil
	}
	change := have.DeepCopy()
	change.Spec = want
	_, err := c.lb.Pools.Update(ctx, change, metav1.UpdateOptions{})
	if apierrors.IsConflict(err) || apierrors.IsNotFound(err) {
		return nil // it will be seen
	}
	return err
}

// recordPool records an Event about a pool, unless it is the last of its reason.
func (c *controller) recordPool(p *v1.IPAddressPool, reason, message string) {
	events := c.poolEvents[p.Name]
	if have, recorded := events[reason]; recorded && have == message {
		return
	}
	if events == nil {
		events = map[string]string{}
		c.poolEvents[p.Name] = events
	}
	events[reason] = message
	c.log.Warn("a pool cannot be used as it is", "pool", p.Name, "reason", reason, "message", message)
	c.events.Event(&corev1.ObjectReference{
		APIVersion: v1.GroupVersion.String(), Kind: "IPAddressPool", Name: p.Name, UID: p.UID,
	}, corev1.EventTypeWarning, reason, message)
}

// writePoolStatus writes the status of the pools whose counts or conditions have changed.
func (c *controller) writePoolStatus(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, stepTimeout)
	defer cancel()
	type change struct {
		pool   *v1.IPAddressPool
		status v1.IPAddressPoolStatus
	}
	var changes []change
	c.mu.Lock()
	for _, p := range c.compiled {
		have := c.pools[p.Name]
		if have == nil || have.UID != p.object.UID {
			continue
		}
		if status := c.poolStatus(p, have); !reflect.DeepEqual(status, have.Status) {
			changes = append(changes, change{have, status})
		}
	}
	c.mu.Unlock()
	for _, ch := range changes {
		text, err := json.Marshal(map[string]any{"metadata": map[string]any{"uid": ch.pool.UID}, "status": nullable(ch.status)})
		if err != nil {
			return err
		}
		out, err := c.lb.Pools.Patch(ctx, ch.pool.Name, types.MergePatchType, text, metav1.PatchOptions{}, "status")
		if apierrors.IsNotFound(err) || apierrors.IsConflict(err) {
			continue
		}
		if err != nil {
			return err
		}
		c.mu.Lock()
		if have := c.pools[out.Name]; have != nil && have.UID == out.UID {
			c.setPool(out)
		}
		c.mu.Unlock()
	}
	return nil
}

// nullable returns a status for a merge patch, in which what is absent has to be null.
func nullable(s v1.IPAddressPoolStatus) map[string]any {
	return map[string]any{"total": s.Total, "free": s.Free, "used": s.Used, "ipv4": s.IPv4, "ipv6": s.IPv6,
		"observedGeneration": s.ObservedGeneration, "conditions": s.Conditions}
}

// shown returns n, at most v1.MaxCount.
func shown(n uint64) int64 { return int64(min(n, v1.MaxCount)) }

// poolStatus returns the status of a pool.
func (c *controller) poolStatus(p *usablePool, have *v1.IPAddressPool) v1.IPAddressPoolStatus {
	out := v1.IPAddressPoolStatus{ObservedGeneration: p.object.Generation, Conditions: slices.Clone(have.Status.Conditions)}
	for _, f := range []struct {
		family svc.Family
		to     **v1.PoolUsage
	}{{svc.IPv4, &out.IPv4}, {svc.IPv6, &out.IPv6}} {
		u := c.alloc.Usage(p.Name, f.family)
		if u.Total == 0 {
			continue
		}
		usage := &v1.PoolUsage{Total: shown(u.Total), Free: shown(u.Free), Used: shown(u.Used)}
		*f.to = usage
		out.Total, out.Free, out.Used = shown(uint64(out.Total+usage.Total)), shown(uint64(out.Free+usage.Free)), out.Used+usage.Used
	}
	put := func(kind string, status metav1.ConditionStatus, reason, message string) {
		meta.SetStatusCondition(&out.Conditions, metav1.Condition{
			Type: kind, Status: status, Reason: reason, Message: message, ObservedGeneration: p.object.Generation})
	}
	set := func(kind string, holds bool, reason, message string) {
		status := metav1.ConditionFalse
		if holds {
			status = metav1.ConditionTrue
		}
		put(kind, status, reason, message)
	}
	if p.wrong != "" {
		set(v1.PoolReady, false, p.wrongReason, p.wrong)
		meta.RemoveStatusCondition(&out.Conditions, v1.PoolOverlap)
		meta.RemoveStatusCondition(&out.Conditions, v1.PoolAnnounceable)
		c.recordPool(have, p.wrongReason, p.wrong)
	} else {
		set(v1.PoolReady, true, "Ready", "")
		reason, message := c.overlap(p)
		set(v1.PoolOverlap, message != "", reason, message)
		if message != "" {
			c.recordPool(have, reason, message)
		}
		status, reason, message := c.announceable(p)
		put(v1.PoolAnnounceable, status, reason, message)
		if _, recorded := c.poolEvents[p.Name][reason]; status == metav1.ConditionFalse && !recorded { // the message may change often
			c.recordPool(have, reason, message)
		} else if status != metav1.ConditionFalse {
			delete(c.poolEvents[p.Name], NotAnnounceable) // it is recorded again when it is so again
		}
	}
	for i := range out.Conditions { // as they come back
		out.Conditions[i].LastTransitionTime = metav1.NewTime(out.Conditions[i].LastTransitionTime.Truncate(time.Second))
	}
	return out
}

// overlap returns which addresses of a pool are not given out though they are listed.
func (c *controller) overlap(p *usablePool) (reason, message string) {
	if others := c.alloc.Overlaps(p.Name); len(others) > 0 {
		return "OverlapsPool", "addresses that pool " + strings.Join(others, ", ") + " has too are given out by that one, which is older"
	}
	var nodes []netip.Addr
	for _, addrs := range c.nodeAddrs {
		for _, a := range addrs {
			if c.alloc.PoolOf(a) == p.Name {
				nodes = append(nodes, a)
			}
		}
	}
	if len(nodes) == 0 {
		return "None", ""
	}
	slices.SortFunc(nodes, netip.Addr.Compare)
	var text []string
	for _, a := range nodes[:min(len(nodes), maxShown+1)] {
		text = append(text, a.String())
	}
	return "HasNodeAddresses", fmt.Sprintf("%d addresses are those of nodes and are not given out: %s", len(nodes), abbreviated(text))
}

// recheckForeign finds out which addresses others have given back.
func (c *controller) recheckForeign(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, stepTimeout)
	defer cancel()
	c.mu.Lock()
	var list []netip.Addr
	for a := range c.foreign {
		list = append(list, a)
	}
	c.mu.Unlock()
	for _, a := range list {
		if _, err := c.client.NetworkingV1().IPAddresses().Get(ctx, a.String(), metav1.GetOptions{}); !apierrors.IsNotFound(err) {
			continue
		}
		c.mu.Lock()
		delete(c.foreign, a)
		if !c.ofSomeNode(a) {
			c.alloc.Unblock(a)
		}
		c.freed = true
		c.mu.Unlock()
		signal(c.wake)
	}
}
