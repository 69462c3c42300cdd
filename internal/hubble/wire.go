package hubble

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net/http"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/fairlead/fairlead/internal/hubble/api/observer"
)

// Path is where an agent answers the server's relay, below it the name of a method of the Observer. The agent's port speaks HTTP/1.1,
// which gRPC cannot use: a request's body is the method's message, and an answer is a sequence of messages, each behind its length
// (uvarint), and at last a length of 0 and the status (google.rpc.Status).
const Path = "/hubble/"

const (
	// maxRequest bounds a question, in bytes.
	maxRequest = 256 << 10
	// MaxFlow bounds a message of an answer with flows, in bytes.
	MaxFlow = 64 << 10
	// MaxAnswer bounds one of other answers, in bytes.
	MaxAnswer = 1 << 20
)

// Handler answers the relay for an Observer, at Path.
func Handler(o *Observer) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodPost {
			w.Header().Set("Allow", http.MethodPost)
			http.Error(w, "use POST", http.StatusMethodNotAllowed)
			return
		}
		body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxRequest))
		if err != nil {
			http.Error(w, "cannot read the request: "+err.Error(), http.StatusBadRequest)
			return
		}
		w.Header().Set("Content-Type", "application/octet-stream")
		out := &frames{w: w, flush: http.NewResponseController(w).Flush}
		err = answer(r.Context(), o, r.URL.Path[len(Path):], body, out)
		_ = out.end(err) // the relay is gone
	})
}

// answer calls a method.
func answer(ctx context.Context, o *Observer, method string, body []byte, out *frames) error {
	switch method {
	case "GetFlows":
		r := &observer.GetFlowsRequest{}
		err := bounded(body, r)
		if err == nil {
			err = proto.Unmarshal(body, r)
		}
		if err != nil {
			return status.Error(codes.InvalidArgument, err.Error())
		}
		// So the relay knows at once that the node answers.
		if err := out.flush(); err != nil {
			return err
		}
		return o.Flows(ctx, r, func(m *observer.GetFlowsResponse) error { return out.send(m, r.GetFollow()) })
	case "ServerStatus":
		return out.send(o.status(), false)
	case "GetNamespaces":
		m, err := o.GetNamespaces(ctx, nil)
		if err != nil {
			return err
		}
		return out.send(m, false)
	}
	return status.Errorf(codes.Unimplemented, "no method %q", method)
}

// frames writes messages.
type frames struct {
	w     io.Writer
	flush func() error
	buf   []byte
}

func (f *frames) send(m proto.Message, now bool) error {
	text, err := proto.Marshal(m)
	if err != nil {
		return err
	}
	f.buf = append(binary.AppendUvarint(f.buf[:0], uint64(len(text))), text...)
	if _, err := f.w.Write(f.buf); err != nil || !now {
		return err
	}
	return f.flush()
}

// end writes the status of an error.
func (f *frames) end(err error) error {
	if _, err := f.w.Write([]byte{0}); err != nil {
		return err
	}
	return f.send(status.New(status.Code(err), status.Convert(err).Message()).Proto(), true)
}

// ReadAnswer reads what Handler writes. It calls f with each message, of limit bytes at most, until that returns an error. Its own
// errors are statuses.
func ReadAnswer(from io.Reader, limit int, f func(message []byte) error) error {
	r := bufio.NewReader(from)
	for {
		text, err := readFrame(r, limit)
		if err != nil {
			return status.Errorf(codes.Unavailable, "the answer ends: %v", err)
		}
		if len(text) > 0 {
			if err := f(text); err != nil {
				return err
			}
			continue
		}
		if text, err = readFrame(r, limit); err != nil {
			return status.Errorf(codes.Unavailable, "the answer ends: %v", err)
		}
		s := status.New(codes.OK, "").Proto()
		if err := proto.Unmarshal(text, s); err != nil {
			return status.Errorf(codes.Internal, "cannot read the status: %v", err)
		}
		return status.ErrorProto(s)
	}
}

func readFrame(r *bufio.Reader, limit int) ([]byte, error) {
	n, err := binary.ReadUvarint(r)
	if err != nil {
		return nil, err
	}
	if n > uint64(limit) {
		return nil, fmt.Errorf("a message of %d bytes; want %d at most", n, limit)
	}
	text := make([]byte, n)
	if _, err := io.ReadFull(r, text); err != nil {
		return nil, errors.Join(io.ErrUnexpectedEOF, err)
	}
	return text, nil
}
