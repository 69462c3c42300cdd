package netlink

import (
	"errors"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/testbed"
)

func TestMain(m *testing.M) { testbed.Main(m) }

func TestAttributesComeBack(t *testing.T) {
	var e Encoder
	e.Begin(7, unix.NLM_F_ACK, unix.AF_INET, 10)
	e.String(1, "abc")
	at := e.Nest(2)
	e.Uint32(3, 0x01020304)
	e.Uint8(4, 9)
	e.Uint16(5, 0x0a0b)
	e.Uint64(6, 1)
	e.Close(at)
	e.Bytes(8, []byte{1, 2, 3, 4, 5})
	e.End()
	if len(e.Buf)%4 != 0 {
		t.Errorf("%d bytes are not aligned", len(e.Buf))
	}
	body := e.Buf[headerLen+genLen:]
	if s := CString(Attr(body, 1)); s != "abc" {
		t.Errorf("string %q", s)
	}
	nested := Attr(body, 2)
	if v := Attr(nested, 3); len(v) != 4 || v[0] != 1 || v[3] != 4 {
		t.Errorf("number %v, want network order", v)
	}
	if v := Attr(nested, 5); len(v) != 2 || v[0] != 0x0a {
		t.Errorf("short number %v", v)
	}
	if v := Attr(body, 8); len(v) != 5 {
		t.Errorf("bytes %v", v)
	}
	if v := Attr(body, 99); v != nil {
		t.Errorf("found %v where nothing is", v)
	}
}

// FuzzAttrs: foreign bytes neither panic nor loop.
func FuzzAttrs(f *testing.F) {
	var e Encoder
	at := e.Nest(1)
	e.String(2, "x")
	e.Close(at)
	f.Add(e.Buf)
	f.Add([]byte{0, 0, 0, 0})
	f.Add([]byte{3, 0, 1, 0, 5})
	f.Fuzz(func(t *testing.T, b []byte) {
		n := 0
		Attrs(b, func(_ uint16, v []byte) {
			n += 4 + len(v)
			_ = CString(v)
			_ = Attr(v, 1)
		})
		if n > len(b) {
			t.Errorf("read %d bytes of %d", n, len(b))
		}
		messages(b, func(_, _ uint16, _ uint32, body []byte) { _ = answer(body) })
	})
}

func TestRefusalNamesItsMessage(t *testing.T) {
	c, err := Dial()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	const delTable = unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_DELTABLE
	const newTable = unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_NEWTABLE
	batch := func(del string) []byte {
		var e Encoder
		e.Begin(unix.NFNL_MSG_BATCH_BEGIN, 0, 0, unix.NFNL_SUBSYS_NFTABLES)
		e.End()
		e.Begin(newTable, unix.NLM_F_CREATE, unix.NFPROTO_IPV4, 0)
		e.String(unix.NFTA_TABLE_NAME, "a")
		e.End()
		e.Begin(delTable, unix.NLM_F_ACK, unix.NFPROTO_IPV4, 0)
		e.String(unix.NFTA_TABLE_NAME, del)
		e.End()
		e.Begin(unix.NFNL_MSG_BATCH_END, 0, 0, unix.NFNL_SUBSYS_NFTABLES)
		e.End()
		return e.Buf
	}
	errs := c.Send(batch("b"))
	var rejected *Error
	if len(errs) != 1 || !errors.As(errs[0], &rejected) || rejected.Index != 2 || !errors.Is(rejected, unix.ENOENT) {
		t.Errorf("Send = %v, want ENOENT of message 2", errs)
	}
	if errs := c.Send(batch("a")); len(errs) != 0 {
		t.Errorf("Send = %v, want success", errs)
	}
	if errs := c.Send(make([]byte, c.MaxMessage()+1<<20)); len(errs) != 1 || !errors.Is(errs[0], unix.EMSGSIZE) {
		t.Errorf("a message too large: %v, want EMSGSIZE", errs)
	}
}

// A second Close does not close the file that has the number by then.
func TestCloseTwice(t *testing.T) {
	c := &Conn{fd: -1}
	var err error
	if c.fd, err = unix.Eventfd(0, unix.EFD_CLOEXEC); err != nil {
		t.Fatal(err)
	}
	number := c.fd
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	other, err := unix.Eventfd(0, unix.EFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	if other != number {
		err = errors.Join(unix.Dup3(other, number, unix.O_CLOEXEC), unix.Close(other))
	}
	if err := errors.Join(err, c.Close(), unix.Close(number)); err != nil {
		t.Error(err)
	}
}
