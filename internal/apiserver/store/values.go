package store

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net"
	"path/filepath"
	"slices"
	"strings"
	"time"

	bolt "go.etcd.io/bbolt"
	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

const (
	// valuesPage is how many values one request of Values gets. Each may have 1.5 MB.
	valuesPage = 100
	// encryptedMark begins each value that an EncryptionConfiguration has encrypted.
	encryptedMark = "k8s:enc:"
)

// Encryption is the provider and the key that have encrypted a value, zero for a value that is not encrypted.
type Encryption struct{ Provider, Key string }

// EncryptionOf returns the encryption of a value of etcd.
func EncryptionOf(value []byte) Encryption {
	// k8s:enc:PROVIDER:VERSION:KEY:...
	parts := strings.SplitN(string(value[:min(len(value), 512)]), ":", 6)
	if len(parts) < 6 || parts[0]+":"+parts[1]+":" != encryptedMark {
		return Encryption{}
	}
	return Encryption{parts[2], parts[4]}
}

// String describes the encryption for messages.
func (e Encryption) String() string { return fmt.Sprintf("provider %s, key %q", e.Provider, e.Key) }

// How often a silent connection to etcd is asked, and how long an answer may take, as kube-apiserver has it.
const (
	keepAliveTime    = 30 * time.Second
	keepAliveTimeout = 10 * time.Second
)

// client returns a client of etcd. It must be closed.
func (e *Store) client(ctx context.Context) (*clientv3.Client, error) {
	c := clientv3.Config{
		Context: ctx, Endpoints: e.Endpoints, Logger: zap.NewNop(), DialKeepAliveTime: keepAliveTime, DialKeepAliveTimeout: keepAliveTimeout,
	}
	if e.Dial != nil {
		c.DialOptions = []grpc.DialOption{grpc.WithContextDialer(func(ctx context.Context, addr string) (net.Conn, error) {
			return e.Dial(ctx, "tcp", addr)
		})}
	}
	return clientv3.New(c)
}

// Values calls look with all values below prefix, until look returns an error. It needs no quorum.
func (e *Store) Values(ctx context.Context, prefix string, look func(kind schema.GroupResource, key string, value []byte) error) error {
	c, err := e.client(ctx)
	if err != nil {
		return err
	}
	defer c.Close()
	prefix = strings.TrimSuffix(prefix, "/") + "/"
	from, end := prefix, clientv3.GetPrefixRangeEnd(prefix)
	for {
		r, err := c.Get(ctx, from, clientv3.WithRange(end), clientv3.WithLimit(valuesPage), clientv3.WithSerializable())
		if err != nil {
			return err
		}
		for _, kv := range r.Kvs {
			key := string(kv.Key)
			kind, _ := kindOf(prefix, key)
			if err := look(kind, key, kv.Value); err != nil {
				return err
			}
			from = key + "\x00"
		}
		if !r.More {
			return nil
		}
	}
}

// kindOf returns the kind of the object with a key below prefix, and what the keys of the kind begin with. The key is
// RESOURCE/... or GROUP/RESOURCE/... behind prefix; the groups without a dot are the oldest of Kubernetes.
func kindOf(prefix, key string) (kind schema.GroupResource, dir string) {
	first, rest, _ := strings.Cut(strings.TrimPrefix(key, prefix), "/")
	dir = prefix + first + "/"
	if !strings.Contains(first, ".") && !slices.Contains([]string{"apps", "autoscaling", "batch", "extensions", "policy"}, first) {
		return schema.GroupResource{Resource: first}, dir
	}
	second, _, _ := strings.Cut(rest, "/")
	return schema.GroupResource{Group: first, Resource: second}, dir + second + "/"
}

// EncryptedKinds returns the kinds below prefix that have encrypted objects in the store of a data directory that no server
// uses, none where there is no store.
func EncryptedKinds(path, prefix string) ([]string, error) {
	file := filepath.Join(path, "etcd", "member", "snap", "db")
	db, err := bolt.Open(file, 0o600, &bolt.Options{ReadOnly: true, Timeout: time.Second})
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	defer db.Close()
	prefix = strings.TrimSuffix(prefix, "/") + "/"
	kinds := map[string]string{} // of the objects that are encrypted, by their keys
	err = db.View(func(tx *bolt.Tx) error {
		b := tx.Bucket([]byte("key"))
		if b == nil {
			return nil
		}
		return b.ForEach(func(_, value []byte) error { // in the order of the revisions
			var kv mvccpb.KeyValue
			if err := proto.Unmarshal(value, &kv); err != nil {
				return fmt.Errorf("%s: %w", file, err)
			}
			key := string(kv.Key)
			switch {
			case !strings.HasPrefix(key, prefix):
			case EncryptionOf(kv.Value) != Encryption{}:
				kind, _ := kindOf(prefix, key)
				kinds[key] = kind.String()
			default: // written again in plain text, or deleted
				delete(kinds, key)
			}
			return nil
		})
	})
	return slices.Compact(slices.Sorted(maps.Values(kinds))), err
}
